"""A plan says why the portable kernels compute it, and the reasons decide which kernels do."""

import itertools
from typing import Any

import pytest
import torch

from trunkattn.cli.kernels import attention_of
from trunkattn.gpu.executor import GpuExecutor, choose_chunk_tile, choose_tiles
from trunkattn.gpu.tuning.cards import H100, H200, GpuFacts, card_of
from trunkattn.gpu.tuning.why_portable import why_portable
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


@pytest.mark.parametrize("card", [H100, H200, PCIE], ids=lambda card: card.description[:16])
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_the_reasons_decide(card: Any, capability: int) -> None:
    for values in itertools.product(*CHANGES.values()):
        config = attention_of(dict(zip(CHANGES, values, strict=True)))
        why = why_portable(config, card, capability)
        assert bool(why.decodes) != any(tile.hopper for tile in choose_tiles(config, card, capability)), config
        if not config.batch_invariant:  # which has no prompt chunks
            assert bool(why.prompts) != choose_chunk_tile(config, card, capability).hopper, config


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
    stats = GpuExecutor(config, CPU, facts=H100_FACTS).plan(tables).stats()
    assert all((f"; portable kernel: {said}" in stats.reason) is (head_dim == 80) for said in (DIM_80, PROMPTS_80))
    assert ("portable" in stats.reason) is (head_dim == 80)
