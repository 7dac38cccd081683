"""The table of kernels: which one computes an attention, in which tiles, why another does not, and what a plan says."""

import itertools
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.workloads import parse_tree, tree_batch
from trunkattn import AttentionConfig
from trunkattn.cli.doctor.kernels import attention_of, kernels_on
from trunkattn.gpu.attention import GpuBackend
from trunkattn.gpu.cards import H100, H200, Card, CardModel, GpuFacts, card_of
from trunkattn.gpu.hopper import spec as hopper
from trunkattn.gpu.kernel import (
    KERNELS,
    Choice,
    Kernel,
    Work,
    choose,
    kernel_named,
    kernels_of,
    portable_kernel,
    refusals,
)
from trunkattn.gpu.launch_order import LaunchOrder
from trunkattn.gpu.portable.spec import INVARIANT_TILE
from trunkattn.gpu.tiles import GpuTile, MergeTile, PrefillTile
from trunkattn.planner.planner import StepTables
from trunkattn.planner.work_list import UNLIMITED
from trunkattn.training.spec import TrainingConfig

from .kernel_cases import CPU, make_card

H100_FACTS = GpuFacts("NVIDIA H100 80GB HBM3", 132, 90, 50 << 20)
PCIE = card_of(GpuFacts("NVIDIA H100 PCIe", 114, 90, 50 << 20))
B200 = card_of(GpuFacts("NVIDIA B200", 148, 100, 126 << 20))
CARDS = {"H100": make_card(model=H100), "H200": make_card(), "PCIe": PCIE}
CHANGES: dict[str, list[Any]] = {
    "head_dim": [64, 80, 96, 128, 256],
    "page_size": [1, 16, 24],
    "dtype": [torch.bfloat16, torch.float32],
    "kv_dtype": [None, torch.float8_e5m2],
    "num_qo_heads": [8, 64],
    "policy": ["auto", "pat"],
    "batch_invariant": [False, True],
    "execution": ["auto", "streams"],
}


def prefill(config: AttentionConfig, card: Card) -> tuple[Choice, PrefillTile]:
    choice = choose(Work.PREFILL, config, card)
    assert choice.kernel
    return choice, choice.kernel.tiles(config, card)[0]


def decode_tiles(config: AttentionConfig, card: Card) -> tuple[GpuTile, ...]:
    return kernels_of(config, card).tiles


def on_hopper(config: AttentionConfig, card: Card) -> list[bool]:
    """Of each tile, whether the Hopper kernel computes it."""
    return [tile.kernel == hopper.DECODE for tile in decode_tiles(config, card)]


def decodes_fast(config: AttentionConfig) -> bool:
    """On an H200."""
    of_16_bits, whole = config.kv_dtype is None, config.page_size % 16 == 0
    takes = {64: True, 96: of_16_bits and whole, 128: True, 256: whole or not of_16_bits}
    asks_nothing = config.policy == "auto" and not config.batch_invariant and config.execution != "streams"
    return config.dtype != torch.float32 and takes.get(config.head_dim, False) and asks_nothing


def prompts_fast(config: AttentionConfig) -> bool:
    """On every measured card."""
    plain = config.dtype != torch.float32 and config.kv_dtype is None and config.page_size % 16 == 0
    return plain and config.head_dim in (64, 128, 256)


@pytest.mark.parametrize("name", CARDS)
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_fast_kernels_where_there_is_no_reason_against_them(name: str, capability: int) -> None:
    card = replace(CARDS[name], facts=CARDS[name].facts._replace(capability=capability))
    for values in itertools.product(*CHANGES.values()):
        config = attention_of(dict(zip(CHANGES, values, strict=True)))
        decode, (prompts, tile) = choose(Work.DECODE, config, card), prefill(config, card)
        trusted = name == "H200" or (name == "H100" and config.head_dim != 96)
        assert decode.is_fast is (capability == 90 and trusted and decodes_fast(config)), config
        assert decode.is_fast is (not decode.reasons), config
        assert decode.is_fast is on_hopper(config, card)[-1], config
        if name != "PCIe":
            assert prompts.is_fast is (capability == 90 and prompts_fast(config)), config
        assert prompts.is_fast is tile.persistent, config


SLOWER_96 = "head_dim 96: the fast kernel is slower for some batches on NVIDIA H100"
PROMPTS_96, PAGES = "head_dim 96: expected 64, 128 or 256", "page_size 8: expected a multiple of 16"
FLOAT32 = "float32 queries: expected bfloat16 or float16"
DIM_80, PROMPTS_80 = (f"head_dim 80: expected 64, {more}128 or 256" for more in ("96, ", ""))
VALUES = "values of 64 dims: expected 80, as keys"
INVARIANT = "batch_invariant=True: expected False"
STREAMS = "execution='streams': expected 'auto', 'serial' or 'overlapped'"
MANY = {"head_dim": 80, "head_dim_v": 64, "dtype": torch.float32, "execution": "streams"}


@pytest.mark.parametrize(
    ("changes", "decodes", "prompts"),
    [
        ({}, (), ()),
        ({"head_dim": 80}, (DIM_80,), (PROMPTS_80,)),
        ({"head_dim": 96}, (SLOWER_96,), ("head_dim 96: expected 64, 128 or 256",)),
        (
            {"head_dim": 96, "page_size": 8},
            ("page_size 8 with heads of 96: expected a multiple of 16",),
            (PROMPTS_96, PAGES),
        ),
        ({"page_size": 8}, (), (PAGES,)),
        ({"num_qo_heads": 8 * 64}, (), ()),
        ({"kv_dtype": torch.float8_e4m3fn}, (), ("float8_e4m3fn caches: expected bfloat16, as the queries",)),
        ({"policy": "pat"}, ("policy='pat': expected 'auto'",), ()),
        ({"batch_invariant": True}, (INVARIANT,), ()),
        (MANY, (FLOAT32, DIM_80, VALUES, STREAMS), (FLOAT32, PROMPTS_80, VALUES)),
    ],
)
def test_what_the_hopper_kernels_say(
    changes: dict[str, Any], decodes: tuple[str, ...], prompts: tuple[str, ...]
) -> None:
    config, card = attention_of(changes), make_card(model=H100)
    for work, name, said in ((Work.DECODE, hopper.DECODE, decodes), (Work.PREFILL, hopper.PREFILL, prompts)):
        assert choose(work, config, card).passed_over.get(name, ()) == said


def test_other_cards_get_a_fast_kernel_only_for_what_was_timed() -> None:
    decode, prompts = (choose(work, attention_of({}), PCIE) for work in (Work.DECODE, Work.PREFILL))
    assert decode.reasons == ("the fast kernel was not timed on NVIDIA H100 PCIe with 114 SMs",)
    assert prompts.reasons == (), "plain prompts were timed well enough for every Hopper card"
    sinks = choose(Work.PREFILL, attention_of({"sinks": True}), PCIE)
    assert sinks.reasons[0].startswith("nothing like it was timed")
    older = card_of(GpuFacts("NVIDIA A100", 108, 80, 40 << 20))
    for work in (Work.DECODE, Work.PREFILL):
        assert choose(work, attention_of({}), older).reasons == (
            "compute capability 8.0: the fast kernels are for 9.0",
        )


def test_a_card_that_is_too_old() -> None:
    card, reason = make_card(capability=75), "compute capability 7.5: expected 8.0 or later"
    latent = {"num_kv_heads": 1, "head_dim": 576, "latent_dim": 512, "sm_scale": 192**-0.5}
    for changes in ({}, {"head_dim": 80}, latent):
        assert refusals(attention_of(changes), card) == [reason]
    for work in (Work.FORWARD, Work.BACKWARD):
        choice = choose(work, TrainingConfig(128, torch.bfloat16, 128), card)
        assert choice.kernel is None and reason in choice.reasons


@pytest.mark.parametrize("head_dim", [128, 576])
@pytest.mark.parametrize("card", [make_card(model=H100), make_card(model=H200), make_card(capability=80)])
def test_no_question_finds_a_kernel_for_another_cache(card: Card, head_dim: int) -> None:
    """A narrow latent row has the width of heads that other kernels take."""
    latent = attention_of(
        {"num_qo_heads": 4, "num_kv_heads": 1, "head_dim": head_dim, "latent_dim": head_dim - 64, "sm_scale": 0.1}
    )
    for config, decodes in ((latent, Work.LATENT), (attention_of({}), Work.DECODE)):
        for asked in (Work.DECODE, Work.LATENT):
            kernel = choose(asked, config, card).kernel
            assert kernel is not None and kernel.work is decodes
        others = {Work.DECODE, Work.LATENT, Work.PREFILL, Work.BOTH} - {decodes}
        if config is not latent:
            others -= {Work.PREFILL, Work.BOTH}
        for kernel in KERNELS:
            assert kernel.work not in others or kernel.refuses(config, card), kernel.name
    assert choose(Work.PREFILL, latent, card).kernel is None and choose(Work.BOTH, latent, card).kernel is None


UNTIMED = [
    {"head_dim": 64},
    {"head_dim": 256},
    {"num_qo_heads": 56},
    {"sinks": True},
    {"logits_soft_cap": 30.0},
]


@pytest.mark.parametrize("options", [*UNTIMED, {"page_size": 1}, {"kv_dtype": torch.float8_e4m3fn}])
def test_the_hopper_kernel_decodes_only_where_it_was_timed(options: dict[str, Any]) -> None:
    config = attention_of(options)
    assert any(on_hopper(config, make_card(model=H100)))
    assert not any(on_hopper(config, make_card(model=replace(H100, runs_hopper_kernels=False))))


def test_padded_heads_are_decoded_by_the_hopper_kernel_where_that_is_faster() -> None:
    for model, expected in ((H100, [False] * 2), (H200, [True] * 3)):
        card = make_card(model=model)
        assert on_hopper(attention_of({"head_dim": 96}), card) == expected
        for other in ({"page_size": 8}, {"kv_dtype": torch.float8_e4m3fn}, {"head_dim": 80}, {"head_dim_v": 128}):
            assert not any(on_hopper(attention_of({"head_dim": 96} | other), card))
        _, tile = prefill(attention_of({"head_dim": 96}), card)
        assert not tile.persistent and kernels_of(attention_of({"head_dim": 96}), card).both is None


@pytest.mark.parametrize("model", [H100, H200], ids=lambda model: model.name)
def test_a_batch_invariant_attention_has_one_portable_tile_and_no_prompt_chunks(model: CardModel) -> None:
    """In the Hopper kernel a row's keys would lie in a block as other requests have them."""
    kernels = kernels_of(attention_of({"batch_invariant": True}), make_card(model=model))
    (tile,) = kernels.tiles
    assert kernels.both is kernels.prefill is kernels.prefill_tile is None
    assert tile.kernel != hopper.DECODE and tile.block_m == 32 and tile.subtiles == 1
    for other in ({"num_qo_heads": 512}, {"head_dim": 256}, {"dtype": torch.float32}, {"kv_dtype": torch.float8_e5m2}):
        config = attention_of({"batch_invariant": True} | other)
        (tile,) = decode_tiles(config, make_card(model=model))
        assert tile.kernel != hopper.DECODE and tile is not INVARIANT_TILE and tile.subtiles == 1


@pytest.mark.parametrize("options", UNTIMED)
def test_the_hopper_kernel_computes_other_prompts_only_where_they_were_timed(options: dict[str, Any]) -> None:
    config = attention_of(options)
    for model in (H100, replace(H100, runs_hopper_kernels=False)):
        _, tile = prefill(config, make_card(model=model))
        assert tile.persistent is model.runs_hopper_kernels
        assert tile.block_m == 128 or not tile.persistent
    assert not prefill(config, B200)[1].persistent


@pytest.mark.parametrize("options", [{}, {"num_qo_heads": 8}, {"num_qo_heads": 256}, {"policy": "pat"}])
def test_every_card_of_capability_9_0_has_the_hopper_kernel_for_plain_prompts(options: dict[str, Any]) -> None:
    assert prefill(attention_of(options), PCIE)[1].persistent
    assert not prefill(attention_of(options), B200)[1].persistent


@pytest.mark.parametrize("head_dim", [80, 128])
def test_a_plan_says_why_it_is_portable(head_dim: int) -> None:
    """Of decodes and of prompt chunks, each for itself."""
    config = attention_of({"head_dim": head_dim, "page_size": 16})
    batch = tree_batch(parse_tree("1,4_512,300"), 16)
    queries = [1, 1, 1, 200]
    starts = torch.tensor([0, *queries]).cumsum(0).int().numpy()
    tables = StepTables(batch.block_table, batch.seq_lens, starts, UNLIMITED)
    stats = GpuBackend(config, CPU, facts=H100_FACTS).plan(tables).stats()
    assert all((f"; portable kernel: {said}" in stats.reason) is (head_dim == 80) for said in (DIM_80, PROMPTS_80))
    assert ("portable" in stats.reason) is (head_dim == 80)


def test_every_work_has_a_portable_kernel_but_those_that_are_two_at_once() -> None:
    names = [kernel.name for kernel in KERNELS]
    assert len(set(names)) == len(names)
    for work in Work:
        portable = [kernel for kernel in KERNELS if kernel.work is work and kernel.portable]
        at_once = work in (Work.BOTH, Work.TREE, Work.BATCH)
        assert len(portable) == (not at_once)
        assert at_once or portable_kernel(work) is [each for each in KERNELS if each.work is work][-1]


def test_every_kernel_has_its_source() -> None:
    """Has what `Kernel.module` says: `bind` for attention, a function of the pass's name and `reads` for training."""
    source = Path(__file__).parents[2] / "src"
    for kernel in KERNELS:
        text = source.joinpath(*kernel.module.split(".")).with_suffix(".py").read_text()
        whole = dict.fromkeys((Work.TREE, Work.BATCH), "attend")
        name = ({Work.FORWARD: "forward", Work.BACKWARD: "backward"} | whole).get(kernel.work, "bind")
        assert f"\ndef {name}(" in text, kernel.name
        if kernel.work in (Work.FORWARD, Work.BACKWARD) and not kernel.portable:
            assert re.search(r"^def reads\(|\breads as reads\b", text, re.MULTILINE), kernel.name


BOTH_BY_CUDNN = (
    "head_dim 128, of values 128, of heads that are not grouped: cuDNN's backward pass is as fast as that of Hopper"
)


def test_training_asks_the_same_table() -> None:
    card = make_card()
    for work, name in ((Work.FORWARD, "Hopper forward"), (Work.BACKWARD, "Hopper backward")):
        choice = choose(work, TrainingConfig(128, torch.bfloat16, 128), card)
        assert choice.kernel and choice.kernel.name == name
        assert next(iter(choice.passed_over)) == f"FlashAttention-4 {work.name.lower()}"
        assert choice.passed_over.get("cuDNN forward", (BOTH_BY_CUDNN,)) == (BOTH_BY_CUDNN,)
        assert choice.kernel.tiles(TrainingConfig(128, torch.bfloat16, 128), card)
        refused = choose(work, TrainingConfig(512, torch.float64, 64), card)
        ours = [each for name, each in refused.passed_over.items() if name.startswith(("Hopper", "portable"))]
        assert refused.kernel is None and {len(each) for each in ours} == {2}


class FakeBlackwell:
    """The spec of a kernel that does not exist: one file, with what it refuses and its tiles."""

    NAME = "Blackwell decode"
    TILE = GpuTile(64, 128, 4, 2, 1, (1000, 1000), (900, 900), kernel=NAME, one_launch=True)

    @staticmethod
    def refuses(config: AttentionConfig, card: Card) -> list[str]:
        reasons = [] if card.capability == 100 else [f"compute capability {card.capability}: expected 100"]
        return reasons + ([] if config.head_dim == 128 else [f"head_dim {config.head_dim}: expected 128"])

    @staticmethod
    def tiles(config: AttentionConfig, card: Card) -> tuple[GpuTile, ...]:
        return (FakeBlackwell.TILE,)


TABLE = (
    Kernel(FakeBlackwell.NAME, Work.DECODE, "no.such.module", FakeBlackwell.refuses, FakeBlackwell.tiles),
    *KERNELS,
)


def test_a_new_kernel_is_one_row() -> None:
    """It is chosen where it refuses nothing, its tiles reach the planner, and elsewhere it says why it is not."""
    plain, other = attention_of({}), attention_of({"head_dim": 64})
    kernels = kernels_of(plain, B200, TABLE)
    assert kernels.decode == (TABLE[0], {}) and kernels.tiles == (FakeBlackwell.TILE,)
    for config, card in ((other, B200), (plain, make_card()), (other, make_card())):
        choice = choose(Work.DECODE, config, card, TABLE)
        assert choice.passed_over[FakeBlackwell.NAME] == tuple(FakeBlackwell.refuses(config, card))
        assert choice.kernel is not TABLE[0] and not refusals(config, card, TABLE)
    hopper_choice = choose(Work.DECODE, plain, make_card(), TABLE)
    assert hopper_choice.kernel is kernel_named(hopper.DECODE), "the next one of the table"
    assert hopper_choice.is_fast and hopper_choice.reasons == (), "a kernel for another card is no reason"


def test_a_new_kernel_for_merges_is_one_row() -> None:
    """Every plan launches it, with its own tile."""
    tile = MergeTile(heads=1, slices=1, sliced_up_to=0, warps=2, ctas_per_sm=3)
    merge = Kernel("another merge", Work.MERGE, "no.such.module", lambda *_: [], lambda *_: (tile,))
    kernels, card = kernels_of(attention_of({}), make_card(), (merge, *KERNELS)), make_card()
    launch = LaunchOrder(kernels, card, streams=False).merge()
    assert (launch.kernel, launch.num_ctas) == (merge.name, 3 * card.num_sms) and kernels.merge_tile is tile


def test_a_plan_does_not_call_a_fast_kernel_portable_because_another_card_has_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trunkattn.gpu.attention.kernels_of", partial(kernels_of, table=TABLE))
    tables = StepTables(np.array([[0]], np.int32), np.array([9], np.int32), np.array([0, 1], np.int32), UNLIMITED)
    for head_dim in (128, 80):
        stats = GpuBackend(attention_of({"head_dim": head_dim}), CPU, facts=H100_FACTS).plan(tables).stats()
        assert ("portable" in stats.reason) is (head_dim == 80)


def test_doctor_and_the_support_matrix_list_a_new_kernel() -> None:
    from benchmarks.page.support_matrix import is_decoded_fast

    why = "compute capability 10.0: the fast kernels are for 9.0"
    assert all(each.decodes.startswith("portable: ") and why in each.decodes for each in kernels_on(B200))
    found = {each.attention: each.decodes for each in kernels_on(B200, TABLE)}
    assert found["Llama-3-8B, Mistral-7B, Qwen3-8B"] == "fast"
    assert found["Llama-3.2-1B"].startswith("portable: head_dim 64: expected 128")
    assert is_decoded_fast(attention_of({}), B200, TABLE) and not is_decoded_fast(attention_of({}), B200)
    assert not is_decoded_fast(attention_of({"head_dim": 64}), B200, TABLE)


@pytest.mark.parametrize("latent_dim", [None, 64])
def test_a_soft_cap_that_would_round_logits_is_refused(latent_dim: int | None) -> None:
    """A GPU's tanh rounds them by 2^-23 of the cap; of one like 1e8 nothing is left of them."""
    config = AttentionConfig(8, 1, 128, 16, torch.bfloat16, latent_dim=latent_dim, sm_scale=0.1, logits_soft_cap=1024)
    assert refusals(config, make_card()) == []
    found = refusals(replace(config, logits_soft_cap=1e8), make_card())
    assert found == ["logits_soft_cap=100000000.0: expected at most 1024, or None for no cap"]
