"""The backward pass for Hopper without one: what it refuses, what it compiles to, and the kernels before and behind the
main one, for which PyTorch stands in. On a card: tests/on_gpu/test_flash_attention.py."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.kernels.tile_solver import ARCHITECTURES
from trunkattn import PrefixTree
from trunkattn.gpu.kernel import Work, choose
from trunkattn.numerics import LOG2_E
from trunkattn.training.hopper import backward as hopper
from trunkattn.training.hopper import division, query_gradients
from trunkattn.training.sequences import NO_TREE, Sequences
from trunkattn.training.spec import TrainingConfig

from ..compiling import compile_report
from ..gpu.kernel_cases import make_card
from .training_cases import FEATURES, TABLE, TREES, TrainingCase, longer

COMPILE = str(Path(__file__).with_name("hopper_compile_report.py"))
KINDS = (
    "causal", "full", "packed", "tree", "causal+window", "full+window", "packed+window+cap", "tree+window+cap",
    "full+cap", "causal+parts",
)  # fmt: skip
ALL = tuple(
    f"{head_dims} {group_size} {kind}"
    for head_dims in ("64", "96", "128", "192/128", "192", "256")
    for group_size in (1, 4)
    for kind in KINDS
) + tuple(f"{head_dim} 1 {kind}+deterministic" for head_dim in (64, 96, 128) for kind in KINDS)
FEW = ("128 4 causal", "64 1 packed", "192/128 4 tree", "96 4 packed")
# Bytes of a thread's stack, about as found with Triton 3.9: addresses and descriptors, which a loop reads again. For
# 192/128, only trees without a window were faster on an H200 with less (the lab note stack-of-192-and-128). With heads
# of 128 they have a loop more, which pays (trees-of-short-prompts).
SPILLED_AT_MOST = {"64": 280, "96": 40, "128": 240, "192/128": 248, "192": 104, "256": 260}
SPILLED_AT_MOST |= {"128 4 tree": 264, "192/128 1 tree": 64, "192/128 4 tree": 64}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "oldest"),
    [
        (FEW[:1], False),
        (FEW[1:2], True),
        (FEW[2:], False),
        *(pytest.param(ALL, oldest, marks=pytest.mark.compile) for oldest in (False, True)),
    ],
)
def test_it_compiles_to_overlapped_products_and_fits_the_card(names: tuple[str, ...], oldest: bool) -> None:
    """C7510 and its kind say that ptxas waits for every matrix product."""
    report = compile_report(COMPILE, *names, oldest=oldest)
    assert set(report) == set(names)
    for name, used in report.items():
        assert used["serialized"] == [], name
        assert used["registers"] > 16 and used["shared"] <= ARCHITECTURES[90].shared_per_cta, name
        assert used["spilled"] <= SPILLED_AT_MOST.get(name, SPILLED_AT_MOST[name.split()[0]]), name


def test_what_it_refuses_goes_to_the_portable_kernel() -> None:
    def chosen(capability: int = 90, **changes: Any) -> tuple[str, str]:
        card = make_card(capability=capability)
        choice = choose(Work.BACKWARD, TrainingConfig(128, torch.bfloat16, 128)._replace(**changes), card)
        assert choice.kernel
        return choice.kernel.name, "; ".join(choice.passed_over.get("Hopper backward", ()))

    features = {"options": ("sliding_window", "logits_soft_cap", "sinks")}
    for changes in (
        {},
        {"options": ("deterministic",)},
        {"dtype": torch.float16},
        {"head_dim": 40, "head_dim_v": 128},
        {"head_dim": 256},
        features,
    ):
        assert chosen(**changes) == ("Hopper backward", "")
    portable = {
        "compute capability 8.0: the fast kernels are for 9.0": {"capability": 80},
        "dtype torch.float32: expected torch.bfloat16 or torch.float16": {"dtype": torch.float32},
        "head_dim 100: expected a multiple of 8 from 40 to 256": {"head_dim": 100},
        "head_dim_v 32: expected a multiple of 8 from 40 to 256": {"head_dim_v": 32},
    }
    for reason, changes in portable.items():
        assert chosen(**changes) == ("portable backward", reason)


class StandIn:
    """Stands in for a kernel, keeps the arguments of its launches, and calls `compute` with them."""

    def __init__(self, compute: Callable[[dict[str, Any]], None]) -> None:
        self.compute = compute
        self.launches: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(**given: Any) -> None:
            self.launches.append(given | {"grid": grid[0]})
            self.compute(given)

        return launch


class Kernels:
    """Compute in PyTorch what the main kernel and the kernel of dq write."""

    def __init__(self, case: TrainingCase) -> None:
        self.case = case
        self.main, self.queries = StandIn(self._add_to_all), StandIn(self._write_dq)

    def _add_to_all(self, given: dict[str, Any]) -> None:
        batch, heads = given["q_desc"].shape[0], self.case.heads[0]
        tile = given["C"].tile
        rows = given["rows_desc"].base.view(batch, heads, -1, 2, tile.block_m)
        sums = given["dq_desc"] and given["dq_desc"].base.view(batch, heads, -1, tile.block_m, tile.keys.dims)
        for number, part in enumerate(self.sequences(given)):
            first = part.begin_q // tile.block_m + number if self.case.packed else 0
            at = slice(first, first - (-len(part.q) // tile.block_m))
            for head in range(heads):
                own = rows[part.row, head, at].transpose(0, 1).flatten(1)[:, : len(part.q)]
                dq, dk, dv = self.gradients(part, head, own, given["scales"].sm_scale)
                if sums is not None:
                    sums[part.row, head, at].flatten(0, 1)[: len(part.q), : part.q.shape[-1]] += dq.float()
                kv_head = head // (heads // self.case.heads[1])
                part.dk[:, kv_head] += dk.to(part.dk.dtype)
                part.dv[:, kv_head] += dv.to(part.dv.dtype)

    def _write_dq(self, given: dict[str, Any]) -> None:
        shape = given["q_desc"].shape
        lse, delta, dq = given["tensors"]
        lse, delta = (rows.view(shape[0], shape[2], shape[1]) for rows in (lse, delta))
        for part in self.sequences(given):
            at = slice(part.begin_q, part.begin_q + len(part.q))
            sm_scale = given["scales"].sm_scale
            for head in range(shape[2]):
                shift = (lse[part.row, head, at] * LOG2_E).nan_to_num(neginf=float("inf"))
                found = self.gradients(part, head, (shift, delta[part.row, head, at]), sm_scale)[0]
                dq.view(shape)[part.row, at, head] = (found * sm_scale).to(dq.dtype)

    def sequences(self, given: dict[str, Any]) -> list[SimpleNamespace]:
        names = {"q": 0, "k": 1, "v": 1, "dout": 0}
        descriptors = {name: given[f"{name}_desc"] for name in names}
        tensors = {name: each.base.as_strided(each.shape, each.strides) for name, each in descriptors.items()}
        for name in ("k", "v") if "work" in given else ():
            tensors[f"d{name}"] = getattr(given["work"], f"d{name}").view(-1, *descriptors[name].shape)[0]
        found, begin = [], [0, 0]
        for number, lengths in enumerate(self.case.lengths):
            packed = self.case.packed and self.case.tree is None
            row = 0 if packed else number
            spans = [slice(start, start + length) for start, length in zip(begin, lengths, strict=True)]
            parts = {name: tensor[row, spans[names.get(name, 1)]] for name, tensor in tensors.items()}
            found.append(SimpleNamespace(row=row, begin_q=begin[0], **parts))
            begin = [start + length for start, length in zip(begin, lengths, strict=True)] if packed else begin
        return found

    def gradients(self, part: SimpleNamespace, head: int, rows: Any, sm_scale: float) -> tuple[torch.Tensor, ...]:
        """dq, not yet multiplied by sm_scale, dk and dv of one query head. rows: shift and delta of its queries."""
        kv_head = head // (self.case.heads[0] // self.case.heads[1])
        q, dout, k, v = part.q[:, head], part.dout[:, head], part.k[:, kv_head], part.v[:, kv_head]
        q, dout, k, v = (tensor.double() for tensor in (q, dout, k, v))
        logits, slope = q @ k.T * sm_scale, 1.0
        if soft_cap := self.case.soft_cap:
            tanh = torch.tanh(logits / soft_cap)
            logits, slope = soft_cap * tanh, 1 - tanh**2
        p = torch.exp2(logits * LOG2_E - rows[0][:, None]).masked_fill(~self.case._seen(len(q), len(k)), 0.0)
        ds = p * slope * (dout @ v.T - rows[1][:, None])
        return ds @ k, ds.T @ q * sm_scale, p.T @ dout


F16 = torch.float16
PARAMETERS = set(hopper.hopper_backward_kernel.arg_names)
QUERY_PARAMETERS = query_gradients.query_gradients_kernel.arg_names
CASES = (
    TrainingCase(((150, 150), (150, 150)), False, True, (2, 2), 64, F16),
    TrainingCase(((70, 300),), False, False, (1, 1), 72, F16, head_dim_v=40),
    replace(longer(TABLE[8], 5, "cpu", F16), heads=(2, 2), head_dim=64, padding=9),
    replace(TREES[1], head_dim=128),
    TrainingCase(((90, 150),), False, True, (4, 1), 64, F16, soft_cap=5.0, has_sinks=True),
    TrainingCase(((70, 150),), False, False, (4, 2), 192, F16, head_dim_v=128, sliding_window=50),
    replace(FEATURES[-1], heads=(2, 2), head_dim=64, head_dim_v=64, dtype=F16, padding=7),
    replace(TREES[3], head_dim=64, head_dim_v=64, heads=(2, 1), dtype=F16),
)


@pytest.mark.slow
@pytest.mark.parametrize(("num_sms", "deterministic"), [(0, False), (132, False), (132, True)])
@pytest.mark.parametrize("case", CASES)
def test_the_kernels_around_the_main_ones_prepare_rows_and_write_gradients(
    case: TrainingCase, num_sms: int, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there are more SMs than CTAs, they share the heads of a group."""
    kernels = Kernels(case)
    monkeypatch.setattr(division, "FEW_KEYS", 0 if num_sms else 1024)
    monkeypatch.setattr(division, "_divide", division._divide.__wrapped__)  # it keeps what it found for other cards
    card = SimpleNamespace(multi_processor_count=num_sms)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(hopper, "hopper_backward_kernel", kernels.main)
    monkeypatch.setattr(query_gradients, "query_gradients_kernel", kernels.queries)
    empty = torch.empty  # the stand-in adds to dk and dv, so they begin with zeros

    def zeros(*shape: Any, **options: Any) -> torch.Tensor:
        return (empty if options["device"] == "meta" else torch.zeros)(*shape, **options)

    monkeypatch.setattr(torch, "empty", zeros)
    out, lse = (torch.cat(parts) if case.packed else torch.stack(parts) for parts in case.plain(torch.float64)[:2])
    dout, dlse = case.inputs[3:]
    pad = (0, 0, 0, 0, 0, len(dout) - len(out)) if case.packed else (0,) * 6
    out = torch.nn.functional.pad(out.to(case.dtype), pad)
    lse = torch.nn.functional.pad(lse.float(), pad[2:], value=-float("inf"))
    saved = (*case.inputs[:3], out, lse.transpose(-1, -2))
    found = hopper.backward((dout, dlse.transpose(-1, -2)), saved, case.sequences, deterministic)
    results = (out, lse, *found)
    case.assert_accurate(results)
    if case.packed:
        case.assert_padding_is_zero(results)
    (given,) = kernels.main.launches
    group_size = case.heads[0] // case.heads[1]
    batch, seqlen_k = given["k_desc"].shape[:2]
    num_blocks = case.sequences.blocks(case.sequences.cu_seqlens_k, seqlen_k, given["C"].tile.block_n)
    assert given["grid"] == batch * case.heads[1] * (group_size // given["C"].members) * num_blocks
    assert given["C"].members == (group_size if num_sms == 0 else 1)
    if given["work"].block_depths is not None:
        depths = case.sequences.tree.depths[: case.tree.num_tokens].split(given["C"].tile.block_m)
        assert given["work"].block_depths.tolist() == [int(block.min()) for block in depths]
    assert set(given) - {"grid", "num_warps", "maxnreg"} == PARAMETERS
    widest = max(case.head_dim, case.width_v)
    adds_dq = not deterministic and widest <= (128 if num_sms else 96)
    assert given["C"].adds_dq == adds_dq and len(kernels.queries.launches) == (not adds_dq)


def divided(lengths: Any, heads: tuple[int, int], head_dim: int = 128, **options: Any) -> tuple[int, bool]:
    """What `division` says of a batch (batch, tokens), of packed sequences (lengths as a list) or of a tree, on a card
    of 132 SMs."""
    tree = lengths if isinstance(lengths, PrefixTree) else None
    packed = isinstance(lengths, list)
    rows = (tree.num_tokens,) if tree else (sum(lengths),) if packed else lengths
    q, k = (torch.empty(*rows, own, head_dim, device="meta") for own in heads)
    sums = torch.zeros(len(lengths) + 1, dtype=torch.int32) if packed else None
    work = tree.work if tree else NO_TREE
    causal = options.pop("causal", True)
    given = Sequences(causal, 0.1, sums, sums, pairs=work.pairs, largest=work.largest)
    return division.division(q, k, k, given, options.pop("deterministic", False))


def test_work_is_divided_so_that_sms_end_together(monkeypatch: pytest.MonkeyPatch) -> None:
    card = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(division, "_divide", division._divide.__wrapped__)
    # a block has 128 keys: 8 heads of 128 blocks are enough CTAs, and 4 heads of 16 blocks are not
    assert divided((1, 16384), (32, 8)) == (1, True)
    assert divided((1, 2048), (32, 4), head_dim=64) == (8, True)
    assert divided((1, 2048), (24, 8), head_dim=64)[0] == 3, "a divisor of the group"
    # all 19,900 tokens see a root of 700: 6 of 156 blocks have most of the work
    few = PrefixTree.from_segments([-1] + [0] * 64, [700] + [300] * 64)
    assert [divided(few, (32, heads))[0] for heads in (32, 8, 4)] == [1, 2, 4]
    two = PrefixTree.from_segments([-1, *[0] * 64, -1, *[65] * 64], [700, *[300] * 64] * 2)
    assert divided(two, (32, 8))[0] == 1, "the keys of two roots keep twice as many SMs busy"
    assert divided(PrefixTree.from_segments([-1, 0, 0], [16384, 300, 300]), (32, 8))[0] == 1


def test_dq_has_a_kernel_of_its_own_where_queries_see_few_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    card = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(division, "_divide", division._divide.__wrapped__)
    heads = (32, 8)
    assert not divided((8, 2048), heads)[1] and divided((8, 2049), heads)[1]
    assert not divided((16, 1024), heads, causal=False)[1] and divided((16, 1032), heads, causal=False)[1]
    assert not divided([100, 4000, 2000], heads)[1] and divided([4000, 4000], heads)[1]
    assert divided((8, 512), heads, head_dim=96)[1], "dq of narrower heads takes less memory"
    assert not divided((1, 16384), heads, deterministic=True)[1] and not divided((1, 16384), heads, head_dim=192)[1]
    prompt, answers = [-1] + [0] * 16, [[512] + [512] * 16, [2048] + [1024] * 16]
    assert [divided(PrefixTree.from_segments(prompt, each), heads)[1] for each in answers] == [False, True]


def test_the_arguments_are_the_parameters_of_the_kernel_of_dq() -> None:
    assert list(query_gradients.QueryArguments._fields) == QUERY_PARAMETERS
