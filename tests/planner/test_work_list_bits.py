"""The planner's bits: hashes of what it makes of 1,000 random steps, compared with those in `work_list_hashes.json`.

A rewrite must not change a plan by accident. A change that means to change plans writes the hashes anew:
`PYTHONPATH=src python -m tests.planner.test_work_list_bits --write`.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np
import pytest
import torch

from trunkattn import AttentionConfig, Capacity
from trunkattn.cpu.tuning import cpu_device
from trunkattn.gpu.attention import GpuBackend
from trunkattn.gpu.cards import GpuFacts, card_of
from trunkattn.gpu.kernel import refusals
from trunkattn.gpu.overlap import overlap_candidates
from trunkattn.planner.from_config import make_planner
from trunkattn.planner.planner import StepTables
from trunkattn.planner.prompt_chunks import join
from trunkattn.planner.tiles.candidates import tile_limits
from trunkattn.planner.tiles.overlap import ChunkTimes
from trunkattn.planner.tiles.step import TiledStep
from trunkattn.planner.work_list import ChunkList, TileList, WorkList

from .tile_cases import items_to_overlap

FILE: Final = Path(__file__).with_name("work_list_hashes.json")
NUM_STEPS: Final = 1000
BLOCK: Final = 100  # steps of one test
POLICIES: Final = ("per_query", "relay", "cascade", "fasttree", "pat", "optimal", "auto")
UNLIMITED: Final = 2**31 - 1


class Card(NamedTuple):
    """name, SMs, compute capability, bytes of the L2 cache. Its repr is hashed, and the names of its fields with it."""

    name: str
    processors: int
    capability: tuple[int, int]
    l2_bytes: int


# The cards whose times are known come three times as often.
CARDS: Final = (
    *(3 * (Card("NVIDIA H100 80GB HBM3", 132, (9, 0), 50 << 20), Card("NVIDIA H200", 132, (9, 0), 60 << 20))),
    Card("NVIDIA A100-SXM4-80GB", 108, (8, 0), 40 << 20),
    Card("NVIDIA B200", 148, (10, 0), 126 << 20),
)


class Step(NamedTuple):
    """One batch, and how it is planned: fields of AttentionConfig, of Capacity, and of the machine.

    cpu_policy, threads: on a CPU; options: on a GPU besides `config`. chunk_ns, reads_ns: of imagined prompt chunks.
    """

    block_table: np.ndarray
    seq_lens: np.ndarray
    query_start_loc: np.ndarray
    window: int
    config: dict[str, Any]
    cpu_policy: str
    cpu_invariant: bool
    threads: int
    card: Card
    options: dict[str, Any]
    capacity: dict[str, int] | None
    chunk_ns: int
    reads_ns: int


# --- Adapter: what this file knows of the project's inside. All below `End of the adapter` is independent of it. ---


class Gpu:
    """A GPU's planner on a card that this machine need not have."""

    def __init__(self, step: Step) -> None:
        major, minor = step.card.capability
        facts = GpuFacts(step.card.name, step.card.processors, 10 * major + minor, step.card.l2_bytes)
        config = accepted(AttentionConfig(**step.config, **step.options), facts)
        self.capacity = Capacity(**step.capacity) if step.capacity else None
        self.attention = GpuBackend(config, torch.device("cpu"), self.capacity, facts=facts)
        planner = self.attention._planner
        self.rule, self.chunks, self.overlap = planner.rule, self.attention._chunks, planner.overlap
        self.forests = planner.forests
        self.batch = StepTables(step.block_table, step.seq_lens, step.query_start_loc, step.window)
        self.step = TiledStep(self.rule, self.forests.forest(self.batch)[0], self.batch)
        self.times = self.step.predict()

    def tiles(self, number: Any) -> TileList:
        return self.step.emit(self.rule.priced.tilings[number])


def accepted(config: AttentionConfig, facts: GpuFacts) -> AttentionConfig:
    """A configuration that is planned alike, where a backend refuses the drawn one: the hashes are older than that."""
    if config.cache_dtype == torch.float8_e4m3fn and facts.capability < 89:
        config = replace(config, kv_dtype=torch.float8_e5m2)
    return replace(config, execution="serial") if refusals(config, card_of(facts)) else config


def work_arrays(work: WorkList) -> tuple:
    return work.items, work.queries, work.partial_slots, work.merge_queries, work.merge_indptr


def tile_arrays(tiles: TileList) -> tuple:
    arrays = tiles.items, tiles.segments, tiles.queries, tiles.partial_slots, tiles.merge_slots, tiles.counts
    return *arrays, tiles.merge_queries, tiles.merge_ranges, tiles.num_slots, tiles.merges_taller


def prefill_arrays(listed: ChunkList) -> tuple:
    return listed.items, listed.queries, listed.partial_slots, listed.block_table


def cpu_work(step: Step, policy: str, invariant: bool) -> tuple:
    """The work list on a CPU."""
    config = AttentionConfig(**step.config, policy=policy, batch_invariant=invariant)
    batch = StepTables(step.block_table, step.seq_lens, step.query_start_loc, step.window)
    planned = make_planner(config, cpu_device(step.threads)).plan(batch)
    return work_arrays(planned.work), planned.num_packs, planned.policy


def times(step: Step, gpu: Gpu) -> tuple:
    """Predicted ns of every candidate tiling."""
    return tuple(gpu.times.tolist())


def tile_lists(step: Step, gpu: Gpu) -> tuple:
    """The tile list of the tiling of least predicted time."""
    return tile_arrays(gpu.tiles(np.argmin(gpu.times)))


def fits(step: Step, gpu: Gpu) -> tuple:
    """What arrays of a fixed size hold, and which candidates surely fit them."""
    if gpu.capacity is None:
        return ()
    limits = tile_limits(gpu.rule, gpu.capacity)
    fitting = np.flatnonzero(TiledStep(gpu.rule, gpu.step.forest, gpu.batch, limits).fits())
    room = gpu.chunks and gpu.chunks.limits
    sizes = limits.items, limits.segments, limits.queries, limits.merged, limits.slots, limits.query_tokens
    rooms = (room.items, room.queries, room.rows, room.columns) if room else ()
    return sizes, rooms, tuple(fitting.tolist())


def chunk_list(step: Step, gpu: Gpu) -> tuple:
    """The list of prompt chunks, cut and whole, joined with the tiles of the others."""
    division = gpu.chunks and gpu.chunks.divide(gpu.batch)
    if not gpu.chunks or not division:
        return ()
    rest, found = division.rest, []
    tiling = gpu.rule.priced.tilings[np.argmin(gpu.times)]
    forest, table = gpu.forests.forest(rest)
    tiles = TiledStep(gpu.rule, forest, replace(rest, block_table=table)).emit(tiling)
    for whole in (False, True):
        planned = gpu.chunks.plan(division, None, whole).planned
        joined, listed = join(tiles, planned.work, division)
        found.append((planned.policy, work_arrays(planned.work), tile_arrays(joined), prefill_arrays(listed)))
    return tuple(found)


def overlapped(step: Step, gpu: Gpu) -> tuple:
    """How many items overlap chunks, and the predicted time, of every tiling that may; what gain is worth it."""
    if gpu.overlap is None or not step.query_start_loc[-1]:
        return ()
    tilings, group_size = gpu.rule.priced.tilings, gpu.rule.group_size
    numbers = overlap_candidates(tilings, range(len(tilings)), gpu.times.tolist(), group_size)
    chunks = ChunkTimes(step.chunk_ns, step.reads_ns)
    found = tuple(tuple(items_to_overlap(gpu.overlap, gpu.tiles(number), chunks)) for number in numbers)
    return found, tuple(gpu.overlap.is_worth(percent * 1000 - 1, 100_000) for percent in range(90, 102))


def whole_step(step: Step, gpu: Gpu) -> tuple:
    """What a back end makes of the step, all of its choices together; or what it says if that does not fit."""
    try:
        planned = gpu.attention.plan(gpu.batch, None)
    except ValueError as error:
        assert "capacity" in str(error)
        return ("refused",)
    chunks = work_arrays(planned.chunks.planned.work) if planned.chunks else ()
    first, last, queries = planned.gpu_plan.arrays["overlapped"][:3].tolist()
    return tile_arrays(planned.tiles.tile_list()), chunks, (first, last, queries)


# --- End of the adapter ---


def batch_bits(step: Step, gpu: Gpu) -> tuple:
    """The step itself: if this differs, the generator of random numbers does."""
    arrays = step.block_table, step.seq_lens, step.query_start_loc, step.window
    return *arrays, repr(step[4:])


PARTS: Final = MappingProxyType[str, Callable[[Step, Gpu], tuple]](
    {
        "batch": batch_bits,
        "cpu auto": lambda step, gpu: cpu_work(step, "auto", False),
        "cpu policy": lambda step, gpu: cpu_work(step, step.cpu_policy, step.cpu_invariant),
        "times": times,
        "tiles": tile_lists,
        "fits": fits,
        "chunks": chunk_list,
        "beside": overlapped,  # the name that the file has
        "step": whole_step,
    }
)


def draw(rng: np.random.Generator, low: int, high: int) -> int:
    """low to high, both included."""
    return int(rng.integers(low, high + 1))


def small(rng: np.random.Generator, most: int) -> int:
    """1 to most, every power of two as likely as the next."""
    bits = draw(rng, 0, most.bit_length() - 1)
    return min(most, draw(rng, 1 << bits, (2 << bits) - 1))


def pick(rng: np.random.Generator, options: tuple) -> Any:
    return options[draw(rng, 0, len(options) - 1)]


def chance(rng: np.random.Generator, percent: int) -> bool:
    return draw(rng, 0, 99) < percent


class Row(NamedTuple):
    """pages: numbers of pages, shared ones first. tokens: that they hold."""

    pages: list[int]
    tokens: int


class Grower:
    """Random prefix trees: nodes of whole pages, then tokens of a request's own."""

    def __init__(self, rng: np.random.Generator, page_size: int) -> None:
        self.rng, self.page_size, self.num_pages = rng, page_size, 0
        self.most = pick(rng, (60, 500, 4000, 16_000)) if page_size >= 8 else 500  # tokens of a node

    def rows(self, count: int, depth: int, prefix: list[int]) -> list[Row]:
        """`count` requests below a prefix, split at most `depth` times more."""
        rng = self.rng
        if count == 1 or depth == 0 or chance(rng, 10):
            return [self._request(prefix) for _ in range(count)]
        found: list[Row] = []
        while count:
            taken = draw(rng, 1, count)
            shared = self._new_pages(small(rng, max(1, self.most // self.page_size))) if chance(rng, 85) else []
            found += self.rows(taken, depth - 1, prefix + shared)
            count -= taken
        return found

    def _request(self, prefix: list[int]) -> Row:
        held, kind = len(prefix) * self.page_size, draw(self.rng, 0, 99)
        if prefix and kind < 6:
            return Row(prefix, held)  # it has nothing of its own
        if prefix and kind < 10:
            tokens = draw(self.rng, 1, held)  # it is a prefix of others
            return Row(prefix[: -(-tokens // self.page_size)], tokens)
        if kind < 13:
            return Row([], 0)  # padding
        own = small(self.rng, self.most)
        if kind < 30:
            own = -(-own // self.page_size) * self.page_size
        return Row(prefix + self._new_pages(-(-own // self.page_size)), held + own)

    def _new_pages(self, count: int) -> list[int]:
        self.num_pages += count
        return list(range(self.num_pages - count, self.num_pages))


def random_query_lens(rng: np.random.Generator, seq_lens: np.ndarray, longest: int) -> np.ndarray:
    """longest: 1 decodes; few tokens: drafts; many: prompt chunks of a few requests, while others decode."""
    percent = 100 if longest < 9 else pick(rng, (5, 10, 20))
    several = np.array([small(rng, longest) if chance(rng, percent) else 1 for _ in seq_lens])
    padding = np.array([chance(rng, 4) for _ in seq_lens])
    return np.where(padding, 0, np.minimum(several, seq_lens)).astype(np.int32)


def random_config(rng: np.random.Generator, page_size: int) -> dict[str, Any]:
    """Mostly one that Hopper's own kernels compute, if the page is right."""
    heads = pick(rng, ((32, 8), (16, 8), (64, 8), (32, 32), (32, 4), (16, 1)))
    if page_size % 16 == 0 and chance(rng, 80):
        dims, dtypes = (128, 128), (torch.bfloat16, torch.bfloat16)
    else:
        heads = heads if chance(rng, 50) else pick(rng, ((8, 1), (9, 3), (14, 2), (28, 4), (24, 1), (40, 40)))
        dims = pick(rng, ((128, 128), (64, 64), (256, 256), (192, 128), (80, 80), (96, 256)))
        half, single, fp8 = torch.float16, torch.float32, torch.float8_e4m3fn
        dtypes = pick(rng, ((half, half), (half, fp8), (half, fp8), (single, single)))
    names = ("num_qo_heads", "num_kv_heads", "head_dim", "head_dim_v", "dtype", "kv_dtype", "page_size")
    return dict(zip(names, (*heads, *dims, *dtypes, page_size), strict=True))


def random_options(rng: np.random.Generator) -> dict[str, Any]:
    """Mostly none."""
    if chance(rng, 15):
        return {"policy": pick(rng, POLICIES)}
    if chance(rng, 8):
        return {"batch_invariant": True}
    return {"execution": pick(rng, ("overlapped", "overlapped", "streams"))} if chance(rng, 25) else {}


def random_step(seed: int) -> Step:
    rng = np.random.default_rng(seed)
    page_size = pick(rng, (16, 32, 64)) if chance(rng, 70) else draw(rng, 1, 64)
    grower = Grower(rng, page_size)
    rows = grower.rows(draw(rng, 1, 64) if chance(rng, 60) else small(rng, 64), draw(rng, 0, 5), [])
    rows = [rows[i] for i in rng.permutation(len(rows))]
    lens = np.array([row.tokens for row in rows], np.int32)
    query_lens = random_query_lens(rng, lens, pick(rng, (1, 8, 40, 500, 2000, 2000, 4000, 4000)))
    shape = (len(rows), max([1, *(len(row.pages) for row in rows)]) + draw(rng, 0, 2))
    num_pages = grower.num_pages + 1
    physical, table = rng.permutation(num_pages), rng.integers(-1, num_pages, shape)
    for number, row in enumerate(rows):
        table[number, : len(row.pages)] = physical[row.pages]
    tokens, capacity = int(query_lens.sum()), None
    if chance(rng, 35):
        capacity = {
            "max_requests": shape[0] + draw(rng, 0, 8),
            "max_query_tokens": max(1, tokens) + draw(rng, 0, 100),
            "max_pages_per_request": shape[1] + draw(rng, 0, 8),
            "num_pages": num_pages,
        }
    starts = np.append(0, np.cumsum(query_lens)).astype(np.int32)
    return Step(
        block_table=table.astype(np.int32),
        seq_lens=lens,
        query_start_loc=starts,
        window=UNLIMITED if chance(rng, 70) else small(rng, 2000),
        config=random_config(rng, page_size),
        cpu_policy=POLICIES[seed % len(POLICIES)],
        cpu_invariant=chance(rng, 10),
        threads=pick(rng, (1, 2, 8, 64)),
        card=pick(rng, CARDS),
        options=random_options(rng),
        capacity=capacity,
        chunk_ns=small(rng, 1 << 20),
        reads_ns=small(rng, 1 << 16),
    )


def update(digest: Any, value: Any) -> None:
    """dtype, shape and bits of arrays; other values with their type, nested as they are."""
    if isinstance(value, np.ndarray):
        digest.update(f"{value.dtype.str}{value.shape}".encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, tuple):
        digest.update(f"({len(value)}".encode())
        for each in value:
            update(digest, each)
    else:
        assert isinstance(value, int | str | np.integer), value
        digest.update((repr(value) if isinstance(value, str) else f"{int(value)},").encode())


def hashes(seed: int) -> list[str]:
    """8 hexadecimal digits of each part of a step."""
    step, found = random_step(seed), []
    gpu = Gpu(step)
    for bits in PARTS.values():
        digest = sha256()
        update(digest, bits(step, gpu))
        found.append(digest.hexdigest()[:8])
    return found


@pytest.mark.parametrize("first", range(0, NUM_STEPS, BLOCK))
def test_plans_have_the_bits_that_they_had(first: int) -> None:
    kept = json.loads(FILE.read_text())
    assert kept["parts"] == list(PARTS) and len(kept["steps"]) == NUM_STEPS
    for seed in range(first, first + BLOCK):
        before = kept["steps"][seed].split()
        differ = [part for part, old, new in zip(PARTS, before, hashes(seed), strict=True) if old != new]
        assert not differ, f"step {seed}: other bits of {', '.join(differ)}"


def test_the_steps_meet_what_they_are_to_meet() -> None:
    """Every part says something of many steps."""
    kept = [row.split() for row in json.loads(FILE.read_text())["steps"]]
    nothing = sha256(b"(0").hexdigest()[:8]
    for number, part in enumerate(PARTS):
        values = [row[number] for row in kept if row[number] != nothing]
        assert len(set(values)) > NUM_STEPS // 4, part


if __name__ == "__main__":
    assert sys.argv[1:] == ["--write"], "expected --write"
    rows = [" ".join(hashes(seed)) for seed in range(NUM_STEPS)]
    FILE.write_text(json.dumps({"parts": list(PARTS), "steps": rows}, indent=0) + "\n")
