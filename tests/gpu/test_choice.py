"""Which kernels compute an attention, and what a plan says of it."""

import itertools
from typing import Any

import pytest
import torch

from trunkattn import AttentionConfig
from trunkattn.cli.kernels import attention_of
from trunkattn.gpu.attention import GpuBackend
from trunkattn.gpu.cards import H100, H200, Card, GpuFacts, card_of
from trunkattn.gpu.tuning.choice import choose_chunk_tile, choose_tiles, why_portable
from trunkattn.planner.planner import StepTables
from trunkattn.planner.splitting import UNLIMITED
from trunkattn.workloads import parse_tree, tree_batch

CPU = torch.device("cpu")
H100_FACTS = GpuFacts("NVIDIA H100 80GB HBM3", 132, 90, 50 << 20)
PCIE = card_of("NVIDIA H100 PCIe", 114)
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


def decodes_fast(config: AttentionConfig) -> bool:
    """On an H200."""
    of_16_bits, whole = config.kv_dtype is None, config.page_size % 16 == 0
    takes = {64: True, 96: of_16_bits and whole, 128: True, 256: whole or not of_16_bits}
    asks_nothing = config.policy == "auto" and not config.batch_invariant and config.execution != "streams"
    return config.dtype != torch.float32 and takes.get(config.head_dim, False) and asks_nothing


def prompts_fast(config: AttentionConfig) -> bool:
    """On every measured card; a batch-invariant attention has no prompt chunks."""
    plain = config.dtype != torch.float32 and config.kv_dtype is None and config.page_size % 16 == 0
    return plain and config.head_dim in (64, 128, 256) and not config.batch_invariant


@pytest.mark.parametrize("card", [H100, H200, PCIE], ids=lambda card: card.name)
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_fast_kernels_where_there_is_no_reason_against_them(card: Card, capability: int) -> None:
    for values in itertools.product(*CHANGES.values()):
        config = attention_of(dict(zip(CHANGES, values, strict=True)))
        why = why_portable(config, card, capability)
        trusted = card is H200 or (card is H100 and config.head_dim != 96)
        assert (not why.decodes) is (capability == 90 and trusted and decodes_fast(config)), config
        assert (not why.decodes) is choose_tiles(config, card, capability)[-1].hopper, config
        if card is not PCIE:
            assert (not why.prompts) is (capability == 90 and prompts_fast(config)), config
        if not config.batch_invariant:
            assert (not why.prompts) is choose_chunk_tile(config, card, capability).hopper, config


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
        ({"kv_dtype": torch.float8_e4m3fn}, (), ("float8_e4m3fn caches: expected bfloat16, as the queries",)),
        ({"policy": "pat"}, ("policy='pat': expected 'auto'",), ()),
        ({"batch_invariant": True}, (INVARIANT,), (INVARIANT,)),
        (MANY, (FLOAT32, DIM_80, VALUES, STREAMS), (FLOAT32, PROMPTS_80, VALUES)),
    ],
)
def test_what_they_say(changes: dict[str, Any], decodes: tuple[str, ...], prompts: tuple[str, ...]) -> None:
    assert why_portable(attention_of(changes), H100, 90) == (decodes, prompts)


def test_other_cards() -> None:
    elsewhere = why_portable(attention_of({}), PCIE, 90)
    assert elsewhere.decodes == ("the fast kernel was not timed on NVIDIA H100 PCIe with 114 SMs",)
    assert elsewhere.prompts == (), "plain prompts were timed well enough for every Hopper card"
    assert why_portable(attention_of({"sinks": True}), PCIE, 90).prompts[0].startswith("nothing like it was timed")
    older = why_portable(attention_of({}), card_of("NVIDIA A100", 108), 80)
    assert set(older.decodes + older.prompts) == {"compute capability 8.0: the fast kernels are for 9.0"}


@pytest.mark.parametrize("head_dim", [80, 128])
def test_a_plan_says_it(head_dim: int) -> None:
    """Of decodes and of prompt chunks, each for itself."""
    config = attention_of({"head_dim": head_dim, "page_size": 16})
    batch = tree_batch(parse_tree("1,4_512,300"), 16)
    queries = [1, 1, 1, 200]
    starts = torch.tensor([0, *queries]).cumsum(0).int().numpy()
    tables = StepTables(batch.block_table, batch.seq_lens, starts, UNLIMITED)
    stats = GpuBackend(config, CPU, facts=H100_FACTS).plan(tables).stats()
    assert all((f"; portable kernel: {said}" in stats.reason) is (head_dim == 80) for said in (DIM_80, PROMPTS_80))
    assert ("portable" in stats.reason) is (head_dim == 80)
