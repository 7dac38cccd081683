"""The merge kernel under Triton's interpreter: any number of query tokens and partials, by tasks of one head, of
several heads and of a slice of one."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.workloads import parse_tree, tree_batch
from trunkattn import Capacity
from trunkattn.cli.doctor.kernels import attention_of
from trunkattn.gpu.attention import GpuBackend
from trunkattn.gpu.cards import GpuFacts
from trunkattn.gpu.kernel import Work
from trunkattn.gpu.layer import Pdl
from trunkattn.gpu.portable import merge
from trunkattn.gpu.portable.spec import merge_tile
from trunkattn.gpu.tiles import MergeTile
from trunkattn.planner.planner import StepTables
from trunkattn.planner.work_list import UNLIMITED

from .guarded_loads import guarded_loads

pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered in log:RuntimeWarning")
HEADS = ((8, 2), (12, 4), (7, 1))  # query heads, KV heads


class Partials:
    """Query tokens in any order, each with its partials: their slots in turns, and some that saw no key."""

    def __init__(self, counts: list[int], heads: tuple[int, int], width: int, seed: int = 0) -> None:
        self.num_qo_heads, self.num_kv_heads = heads
        self.width = width
        torch.manual_seed(seed)
        ends = torch.cumsum(torch.tensor([0, *counts]), 0).int()
        self.ranges = torch.stack([ends[:-1], ends[1:]], 1).flip(0).contiguous()
        self.queries = torch.randperm(len(counts)).int()
        self.partial = torch.randn(int(ends[-1]), self.num_qo_heads, width)
        self.lse = 5 * torch.randn(int(ends[-1]), self.num_qo_heads)
        self.lse[torch.rand_like(self.lse) < 0.2] = -torch.inf
        self.v_scale = torch.rand(self.num_kv_heads) + 0.5
        self.sinks = torch.randn(self.num_qo_heads)

    def merged(self, num_programs: int, tile: MergeTile, sinks: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """By the kernel: out and lse."""
        out = torch.full((len(self.queries), self.num_qo_heads, self.width), torch.nan)
        lse = torch.full(out.shape[:2], torch.nan)
        kernel: Any = merge.merge_kernel[(num_programs,)]
        with guarded_loads():
            kernel(
                operands=merge.MergeOperands(out, lse, self.partial, self.lse),
                work=merge.MergeWork(self.queries, self.ranges, torch.tensor([len(self.queries)], dtype=torch.int32)),
                v_scale=self.v_scale,
                sinks=self.sinks if sinks else None,
                strides=merge.OutStrides(*out.stride()[:2]),
                COUNT_AT=0,
                SHAPE=merge.merge_shape(self.num_qo_heads, self.num_kv_heads, self.width, tile),
                SINKS=sinks,
                RETURN_LSE=True,
                PDL=Pdl(False, False),
            )
        return out, lse

    def expected(self, sinks: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """The same in float64."""
        out = torch.zeros(len(self.queries), self.num_qo_heads, self.width, dtype=torch.float64)
        out_lse = torch.full(out.shape[:2], -torch.inf, dtype=torch.float64)
        scale = self.v_scale.double().repeat_interleave(self.num_qo_heads // self.num_kv_heads)[:, None]
        for query, (first, last) in zip(self.queries.tolist(), self.ranges.tolist(), strict=True):
            logits = self.lse[first:last].double()
            whole = out_lse[query] = logits.logsumexp(0)
            if sinks:
                whole = torch.logaddexp(whole, self.sinks.double())
            weights = (logits - whole).exp().nan_to_num(0.0)  # NaN where no partial saw a key
            out[query] = (weights[..., None] * self.partial[first:last].double()).sum(0) * scale
        return out, out_lse


@pytest.mark.slow
@settings(max_examples=20)
@given(
    counts=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    heads=st.sampled_from(HEADS),
    width=st.sampled_from([16, 80, 256]),
    num_programs=st.sampled_from([1, 3, 60]),
    sinks=st.booleans(),
)
def test_any_partials_are_merged(
    counts: list[int], heads: tuple[int, int], width: int, num_programs: int, sinks: bool
) -> None:
    case = Partials(counts, heads, width, seed=len(counts))
    found = case.merged(num_programs, merge_tile(heads[0], width), sinks)
    for out, expected in zip(found, case.expected(sinks), strict=True):
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("num_heads", "width", "several"),
    [(32, 128, 4), (64, 64, 8), (28, 128, 4), (16, 256, 2), (14, 64, 2), (7, 128, 1), (8, 512, 4)],
)
def test_as_many_heads_as_fit_and_divide_all(num_heads: int, width: int, several: int) -> None:
    assert merge_tile(num_heads, width).heads == several
    assert merge_tile(num_heads, width, batch_invariant=True).heads == 1


@pytest.mark.slow
@pytest.mark.parametrize("num_programs", [1, 200])
def test_few_heads_are_cut_into_slices_and_more_are_not(num_programs: int) -> None:
    """A slice has the output of the whole head, and each of them the same lse."""
    case, tile = Partials([1, 3, 33, 129, 140], (8, 2), 80), merge_tile(8, 80)
    assert (tile.slices, tile.most_tasks(40)) == (4, 160)
    expected = case.expected()
    for each in (tile, replace(tile, sliced_up_to=39)):
        for found, wanted in zip(case.merged(num_programs, each), expected, strict=True):
            torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    many = tile.sliced_up_to + 1
    assert tile.most_tasks(many) == many


@pytest.mark.parametrize("width, slices", [(16, 1), (32, 2), (64, 4), (128, 4), (256, 2), (512, 2)])
def test_a_slice_is_no_narrower_than_16_dims(width: int, slices: int) -> None:
    assert merge_tile(8, width).slices == slices
    invariant = merge_tile(8, width, batch_invariant=True)
    assert (invariant.slices, invariant.most_tasks(8)) == (1, 8)


@pytest.mark.slow
def test_a_batch_invariant_merge_adds_in_one_order() -> None:
    """However many programs there are, a task is one head. That Triton makes one code of it a card has to show."""
    case = Partials([1, 2, 9, 17, 33], (8, 2), 64)
    invariant, other = merge_tile(8, 64, batch_invariant=True), merge_tile(8, 64)
    many, few = case.merged(40, invariant), case.merged(3, invariant)
    assert all(torch.equal(one, two) for one, two in zip(many, few, strict=True))
    assert not torch.equal(many[0], case.merged(3, other)[0]), "so there is something to keep"


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("capacity", [None, Capacity(64, 64, 64, 64)])
def test_plans_merge_as_their_attention_asks(batch_invariant: bool, capacity: Capacity | None) -> None:
    """Of plans of their own, and of fixed size; heads of 256 have fewer programs of more warps."""
    for width, ctas_per_sm in ((128, 16), (256, 8)):
        config = attention_of({"head_dim": width, "num_qo_heads": 16, "batch_invariant": batch_invariant})
        backend = GpuBackend(config, torch.device("cpu"), capacity, facts=GpuFacts("NVIDIA H200", 132, 90, 50 << 20))
        batch = tree_batch(parse_tree("1,200_1024,20" if capacity is None else "1,60_512,20"), 16)
        starts = torch.arange(len(batch.seq_lens) + 1).int().numpy()
        plan = backend.plan(StepTables(batch.block_table, batch.seq_lens, starts, UNLIMITED)).gpu_plan
        several = 1 if batch_invariant else {128: 4, 256: 2}[width]
        assert plan.merge_tile.heads == several
        (merge,) = [launch for launch in plan.launches if launch.work is Work.MERGE]
        assert merge.num_ctas == 132 * ctas_per_sm
