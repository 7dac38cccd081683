"""Which tiles a card can run well: PAT's offline constraints (§5.2, "Multi-tile kernel"), from compiled kernels.

Upper bounds on m and n: registers and shared memory, counted by the compiler instead of estimated. Lower bound on n:
the keys or values in flight must cover the memory's latency times its bandwidth. Both sizes are powers of two from 16.
"""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple

from trunkattn.gpu.tiles import GpuTile, Tile


class PipelineOps(NamedTuple):
    """Places in the code of a kernel with pipelines: where a producer fills a stage by TMA, where it acquires one,
    where consumers multiply with a stage, and where they release one."""

    fills: int
    acquires: int
    products: int
    releases: int


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes: registers of a thread, bytes a thread spills, bytes of shared memory of a CTA, how
    many named barriers the compiler took for itself, the first ones, the operations of its pipelines, if it has any,
    and whether the assembler says that a matrix product waits for the one before."""

    registers: int
    spilled: int
    shared: int
    barriers: int = 1
    pipelines: PipelineOps | None = None
    serialized: bool = False


@dataclass(frozen=True)
class Architecture:
    """An SM: 32-bit registers, bytes of shared memory (1 KiB of each CTA is the system's), the most for one CTA,
    threads, CTAs."""

    registers: int
    shared: int
    shared_per_cta: int
    threads: int
    ctas_per_sm: int

    def resident(self, tile: Tile, used: Resources) -> int:
        """CTAs of a tile that run on one SM at once; registers are given out by 256 to a warp."""
        per_warp = -(-used.registers * 32 // 256) * 256
        return min(
            self.ctas_per_sm,
            self.threads // (32 * tile.warps),
            self.registers // (per_warp * tile.warps),
            self.shared // (used.shared + 1024),
        )


# CUDA C++ programming guide, table "Technical specifications per compute capability".
ARCHITECTURES: Final = MappingProxyType(
    {
        80: Architecture(65536, 164 << 10, 163 << 10, 2048, 32),
        90: Architecture(65536, 228 << 10, 227 << 10, 2048, 32),
        100: Architecture(65536, 228 << 10, 227 << 10, 2048, 32),
    }
)


@dataclass(frozen=True)
class Memory:
    """Memory of a card: latency of a load in ns, bandwidth in bytes per ns, SMs."""

    latency_ns: int
    bytes_per_ns: int
    num_sms: int


def reasons_against(
    tile: GpuTile, used: Resources, architecture: Architecture, memory: Memory, token_bytes: int
) -> list[str]:
    """Why a tile is not to be listed for a card; empty: it may. token_bytes: one key or value of one head."""
    reasons = []
    for name, size in (("m", tile.block_m), ("n", tile.block_n)):
        if size < 16 or size & (size - 1):
            reasons.append(f"{name}={size} is no power of two from 16")
    if used.shared > architecture.shared_per_cta:
        reasons.append(f"{used.shared} bytes of shared memory, {architecture.shared_per_cta} allowed")
    if used.spilled:
        reasons.append(f"spills {used.spilled} bytes")
    ctas_per_sm = architecture.resident(tile, used)
    if ctas_per_sm:
        least, flying = least_keys(ctas_per_sm, memory, token_bytes), keys_in_flight(tile)
        if flying < least:
            reasons.append(f"{ctas_per_sm} CTAs on an SM need {least} keys in flight each, {flying} are")
    elif not reasons:
        reasons.append("no CTA fits an SM")
    return reasons


def least_keys(ctas_per_sm: int, memory: Memory, token_bytes: int) -> int:
    """PAT's bound: n >= latency · bandwidth / (SMs · CTAs per SM · bytes of a key)."""
    return -(-memory.latency_ns * memory.bytes_per_ns // (memory.num_sms * ctas_per_sm * token_bytes))


def keys_in_flight(tile: GpuTile) -> int:
    """Keys of one CTA: while it computes with one stage, the others load."""
    return tile.block_n * (tile.stages - 1)
