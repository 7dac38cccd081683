"""The GPU kernels compile without a GPU, for three generations of cards, and fit them: registers and shared memory."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from benchmarks.kernels.tile_solver import ARCHITECTURES
from trunkattn.gpu.hopper.pipeline import BAR_K_EMPTY

from ..compiling import compile_report

pytestmark = pytest.mark.slow

COMPILE = str(Path(__file__).with_name("compile_report.py"))

# Bytes of a thread's stack of what is no tile for decoding, about as found with Triton 3.9: more is what this notices.
SPILLED_AT_MOST = {
    # outside of the loop over blocks without a mask, but for two reloads
    "hopper prefill": 384, "hopper prefill window": 392, "hopper prefill with all options": 624,
    # outside of the two loops over blocks without a mask
    "hopper prefill and decode": 520, "hopper prefill and decode masked": 520, "hopper prefill and decode window": 528,
    "hopper prefill and decode with all options": 824,
}  # fmt: skip
# By head_dim and the bytes of a number in the cache: of a thread that computes or gathers.
DECODE_SPILLS = {
    (64, 2): {"loaded": (16, 48, 48), "gathered": (0, 24, 80)},
    (96, 2): {"loaded": (0, 0, 0)},
    (64, 1): {"widened": (8, 8, 8), "gathered": (0, 0, 24)},
    (128, 2): {"loaded": (0, 0, 0), "gathered": (200, 288, 312)},
    (128, 1): {"widened": (0, 72, 40), "gathered": (16, 104, 160)},  # the last is 128 with Triton 3.6
    (256, 2): {"loaded": (304, 320, 328), "gathered": (496, 512, 536)},
    (256, 1): {"widened": (16, 24, 32), "gathered": (48, 128, 192)},
}
PREFILL_SPILLS = {  # what does not spill is slower on an sm_90 (tile_table.py)
    (80, 256, "bf16"): 8, (80, 256, "fp8e5"): 24, (80, 256, "fp32"): 208, (90, 256, "bf16"): 88,
    (90, 256, "fp8e4nv"): 248, (90, 256, "fp32"): 16, (100, 256, "bf16"): 248, (100, 256, "fp8e4nv"): 72,
    (100, 256, "fp32"): 56,
}  # fmt: skip
OPTIONS = ("", " masked", " with all options")
PROMPTS_ON_HOPPER = frozenset({"hopper prefill", "hopper prefill window", "hopper prefill with all options"})
SHORT_WINDOWS = {"hopper prefill short window": 264, "hopper prefill short with all options": 392}  # spilled bytes
BOTH_ON_HOPPER = frozenset({
    "hopper prefill and decode", "hopper prefill and decode masked", "hopper prefill and decode window",
    "hopper prefill and decode with all options",
})  # fmt: skip
PORTABLE = frozenset(f"{rows}x{keys} portable" for rows in (16, 32, 64) for keys in (32, 64, 128))
# All of a target takes half a minute or more, so all but these few kernels are left to `make test-compile`.
FEW = {
    (80, 128, "bf16", "bf16"): ("64x64",),
    (90, 128, "bf16", "bf16"): (
        "64x64", "16x64 merging", "32x64 invariant", "prefill", "merge", "loaded decode with all options",
        "gathered decode with all options", "hopper prefill with all options", "hopper prefill and decode",
    ),
    (90, 128, "bf16", "fp8e4nv"): ("widened decode with all options",),
    (100, 128, "bf16", "bf16"): ("64x64",),
}  # fmt: skip
TARGETS = (
    *((capability, 128, "bf16", "bf16") for capability in ARCHITECTURES), (90, 128, "bf16", "fp8e4nv"),
    (90, 64, "bf16", "bf16"), (90, 64, "bf16", "fp8e4nv"), (90, 96, "bf16", "bf16"),
    *((capability, 256, "bf16", "bf16") for capability in ARCHITECTURES),
    (80, 128, "bf16", "fp8e5"), (100, 128, "bf16", "fp8e4nv"),
    (80, 256, "bf16", "fp8e5"), (90, 256, "bf16", "fp8e4nv"), (100, 256, "bf16", "fp8e4nv"),
    *((capability, head_dim, "fp32", "fp32") for capability in ARCHITECTURES for head_dim in (128, 256)),
)  # fmt: skip


class Compiled(NamedTuple):
    """By kernel: registers, spilled and shared bytes, CTAs on an SM, and how many it is to hold. No names: of all."""

    capability: int
    head_dim: int
    kv_dtype: str
    names: tuple[str, ...]
    report: dict[str, dict[str, Any]]

    @property
    def decodes_on_hopper(self) -> dict[str, int]:
        """The Hopper decode kernel in each way to get keys and values that such a cache has: name -> bytes that it
        spills."""
        if self.capability != 90 or self.kv_dtype == "fp32":
            return {}
        ways = DECODE_SPILLS[self.head_dim, 2 if self.kv_dtype == "bf16" else 1]
        return {
            f"{way} decode{option}": spilled
            for way, each in ways.items()
            for option, spilled in zip(OPTIONS, each, strict=True)
        }


@pytest.fixture(
    scope="module",
    params=[*FEW.items(), *(pytest.param((target, ()), marks=pytest.mark.compile) for target in TARGETS)],
    ids=lambda it: f"sm{it[0][0]}-{it[0][1]}-{it[0][3]}-{'few' if it[1] else 'all'}",
)
def compiled(request: pytest.FixtureRequest) -> Compiled:
    target, names = request.param
    capability, head_dim, _, kv_dtype = target
    return Compiled(capability, head_dim, kv_dtype, names, compile_report(COMPILE, *map(str, target), *names))


def test_every_kernel_compiles(compiled: Compiled) -> None:
    assert all(used["registers"] > 16 for used in compiled.report.values())
    if compiled.names:
        assert set(compiled.report) == set(compiled.names)
        return
    tiles = {name for name in compiled.report if name[0].isdigit()}
    assert len(tiles - PORTABLE - {"32x64 invariant"}) == 4, "low, merging, tall, flat"
    others = {"prefill"} | ({"merge", "invariant merge"} if compiled.kv_dtype == "bf16" else set())
    others |= set(compiled.decodes_on_hopper)
    if (compiled.capability, compiled.kv_dtype) == (90, "bf16"):
        keys = {64: 128, 96: 64, 128: 64, 256: 32}[compiled.head_dim]
        others |= {f"{rows}x{keys} portable" for rows in (16, 32, 64)}
        others |= (PROMPTS_ON_HOPPER | {"prefill portable"}) if compiled.head_dim != 96 else set()
        others |= BOTH_ON_HOPPER if compiled.head_dim == 128 else set()
        others |= SHORT_WINDOWS.keys() if compiled.head_dim == 64 else set()
    assert set(compiled.report) == tiles | others


def test_shared_memory_fits_the_device(compiled: Compiled) -> None:
    for name, used in compiled.report.items():
        assert used["shared"] <= ARCHITECTURES[compiled.capability].shared_per_cta, name


def test_no_listed_tile_spills(compiled: Compiled) -> None:
    target = (compiled.capability, compiled.head_dim)
    allowed = {"prefill": PREFILL_SPILLS.get((*target, compiled.kv_dtype), 0)} | compiled.decodes_on_hopper
    if compiled.head_dim == 256:
        allowed |= {"64x32 portable": 264}
        allowed |= dict.fromkeys(PROMPTS_ON_HOPPER, 752) | {"prefill portable": 432}  # Triton 3.6 has 200 of the former
    if target in ((90, 96), (90, 128)) and compiled.kv_dtype == "bf16":
        allowed |= {"32x64 invariant": 16}  # two reloads; Triton 3.6 has none
    if compiled.head_dim == 64:
        allowed |= dict.fromkeys(PROMPTS_ON_HOPPER, 216) | SHORT_WINDOWS  # Triton 3.6 has 24, and 152
    for name, used in compiled.report.items():
        assert used["spilled"] <= (SPILLED_AT_MOST | allowed).get(name, 0), name


def test_triton_leaves_the_empty_barriers_of_pipelines_alone(compiled: Compiled) -> None:
    on_hopper = PROMPTS_ON_HOPPER | SHORT_WINDOWS.keys() | BOTH_ON_HOPPER | set(compiled.decodes_on_hopper)
    for name in on_hopper & set(compiled.report):
        assert 0 < compiled.report[name]["barriers"] <= BAR_K_EMPTY.value, name


def test_producers_acquire_and_consumers_release_every_stage(compiled: Compiled) -> None:
    """The race checker does not see what TMA writes. Where producer warps widen, TMA fills slots of their own, for two
    blocks ahead of an item and one in its loop, of keys and of values; the warps acquire a stage of each pipeline, as
    those that gather do."""
    pipelines = {name: used["pipelines"] for name, used in compiled.report.items() if used["pipelines"]}
    on_hopper = {name for name in compiled.report if name.startswith("hopper")} | set(compiled.decodes_on_hopper)
    assert set(pipelines) == on_hopper & set(compiled.report)
    for name, (fills, acquires, products, releases) in pipelines.items():
        if name.startswith(("widened", "gathered")):
            assert (fills, acquires) == (6 if name.startswith("widened") else 0, 2), name
        else:
            assert acquires == fills >= 2, f"{name}: a stage is filled that its consumers have not released"
        assert releases == products >= 6, f"{name}: a product does not release its stage"


def test_no_matrix_product_waits_for_the_one_before(compiled: Compiled) -> None:
    assert [name for name, used in compiled.report.items() if used["serialized"]] == []


def test_as_many_ctas_share_an_sm_as_the_tile_table_says(compiled: Compiled) -> None:
    """On the cards that it was measured on; others may hold fewer low ones."""
    for name, used in compiled.report.items():
        if "expected" in used and (compiled.capability == 90 or "16x" not in name):
            assert used["ctas_per_sm"] >= used["expected"], name


@pytest.mark.parametrize(
    "names",
    [
        ("64x64", "merge", "gathered decode with all options"),
        pytest.param(FEW[90, 128, "bf16", "bf16"], marks=pytest.mark.compile),
    ],
)
def test_kernels_compile_with_the_oldest_triton(names: tuple[str, ...]) -> None:
    report = compile_report(COMPILE, "90", "128", "bf16", "bf16", *names, oldest=True)
    assert set(report) == set(names) and all(used["registers"] > 16 for used in report.values())
    assert [name for name, used in report.items() if used["serialized"]] == []
