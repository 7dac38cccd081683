"""Which tiles a card can run well: PAT's offline constraints (§5.2, "Multi-tile kernel"), from compiled kernels.

Upper bounds on m and n: registers and shared memory, counted by the compiler instead of estimated. Lower bound on n:
the keys or values in flight must cover the memory's latency times its bandwidth. Both sizes are powers of two from 16.
"""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple

from trunkattn.kernels.tile_table import GpuTile, Tile


class Rings(NamedTuple):
    """Places in the code of a kernel that has rings in shared memory: where the copy engine is told to fill a slot,
    where that waits for the slot, where slots are multiplied with, and where they are given back."""

    fills: int
    waits: int
    products: int
    returns: int


@dataclass(frozen=True)
class Resources:
    """Of a compiled kernel: registers of a thread, bytes a thread spills, bytes of shared memory of a program, how many
    named barriers the compiler took for itself, the first ones, and its rings, if it has any."""

    registers: int
    spilled: int
    shared: int
    barriers: int = 1
    rings: Rings | None = None


@dataclass(frozen=True)
class Architecture:
    """A multiprocessor: 32-bit registers, bytes of shared memory (1 KiB of each program is the system's), the most for
    one program, threads, programs."""

    registers: int
    shared: int
    shared_per_program: int
    threads: int
    programs: int

    def resident(self, tile: Tile, used: Resources) -> int:
        """Programs of a tile that run on one multiprocessor at once; registers are given out by 256 to a warp."""
        per_warp = -(-used.registers * 32 // 256) * 256
        return min(
            self.programs,
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
    """Of a card: latency of a load in ns, bandwidth in bytes per ns, multiprocessors."""

    latency_ns: int
    bytes_per_ns: int
    processors: int


def reasons_against(
    tile: GpuTile, used: Resources, architecture: Architecture, memory: Memory, token_bytes: int
) -> list[str]:
    """Why a tile is not to be listed for a card; empty: it may. token_bytes: one key or value of one head."""
    reasons = []
    for name, size in (("m", tile.block_m), ("n", tile.block_n)):
        if size < 16 or size & (size - 1):
            reasons.append(f"{name}={size} is no power of two from 16")
    if used.shared > architecture.shared_per_program:
        reasons.append(f"{used.shared} bytes of shared memory, {architecture.shared_per_program} allowed")
    if used.spilled:
        reasons.append(f"spills {used.spilled} bytes")
    programs = architecture.resident(tile, used)
    if programs:
        least, flying = least_keys(programs, memory, token_bytes), keys_in_flight(tile)
        if flying < least:
            reasons.append(f"{programs} programs need {least} keys in flight each, {flying} are")
    elif not reasons:
        reasons.append("no program fits a multiprocessor")
    return reasons


def least_keys(programs: int, memory: Memory, token_bytes: int) -> int:
    """PAT's bound: n >= latency · bandwidth / (processors · programs · bytes of a key)."""
    return -(-memory.latency_ns * memory.bytes_per_ns // (memory.processors * programs * token_bytes))


def keys_in_flight(tile: GpuTile) -> int:
    """Of one program: while it computes with one stage, the others load."""
    return tile.block_n * (tile.stages - 1)
