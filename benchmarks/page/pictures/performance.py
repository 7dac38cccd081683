"""The charts of measurements: three of the performance page, and those of other pages."""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from benchmarks.page import cpu
from benchmarks.page.common import load
from benchmarks.page.latent import most_gain, speed_up
from benchmarks.page.names import use_of
from benchmarks.page.pictures.chart import Axis, Bar, Curve, bars, curves
from benchmarks.page.pictures.drawing import THIRD, Drawing
from benchmarks.page.pictures.predictions import predictions

# One batch of each kind; the page's table has all.
_BATCHES: Final = (
    "64 x (4 groups x 12000 + 64)", "256 x (1024 + 128)", "128 x (8 groups x 512 + 128)", "32 x (2048)", "1 x (2048)",
)  # fmt: skip
_KERNELS: Final = MappingProxyType(
    {
        "flash_attention_3": ("other", "FlashAttention-3"), "flashinfer_decode": ("other", "FlashInfer"),
        "fasttree": ("other", "FastTree"), "trunkattn": ("trunk", "TrunkAttention"),
    }
)  # fmt: skip
_LATENT_HEADS: Final = MappingProxyType({8: "trunk", 16: "left", 32: "right", 64: "own", 128: "other"})
# Batches that share most of their tokens, and how many requests share a trunk there
_SHARERS: Final = MappingProxyType({"64 x (4 groups x 12032 + 256)": 16, "64 x (8192 + 512)": 64})
_CURVES: Final = MappingProxyType({"CPU": "own", "H100": "left", "H200": "right"})


def vllm() -> Drawing:
    """Time per output token in vLLM on an H100."""
    rows = {row["workload"]: row for row in load("vllm-tpot-h100")["rows"]}
    groups = []
    for batch in _BATCHES:
        stock, ours = rows[batch]["FLASH_ATTN"]["tpot_ms"], rows[batch]["CUSTOM"]["tpot_ms"]
        texts = f"{stock:.1f}", f"{ours:.1f}  ({stock / ours:.2f}×)"
        pair = [Bar("other", stock, texts[0]), Bar("trunk", ours, texts[1])]
        groups.append((use_of(batch), pair))
    names = (("other", "FlashAttention-3"), ("trunk", "TrunkAttention"))
    note = "Llama-3-8B's shape, bf16. In brackets: speed-up."
    return bars("Time per token in vLLM, H100, ms", names, groups, note, width=THIRD)


def kernels() -> Drawing:
    """Time of decode kernels over SOL."""
    groups = []
    for card in ("H100", "H200"):
        means = dict(load(f"kernels-{card.lower()}-bfloat16")["times_sol"]["32/8"])
        means["flashinfer_decode"] = min(means["flashinfer_decode"], means["flashinfer_decode_cuda_cores"])
        found = [Bar(shade, means[way], f"{name} {means[way]:.1f}") for way, (shade, name) in _KERNELS.items()]
        groups.append((card, found))
    note = "1 is what memory and arithmetic allow. Mean over 18 trees, 32/8 heads of 128, bf16; lower is better."
    return bars("Decode time over speed of light", (), groups, note, width=THIRD)


def shared_prompt() -> Drawing:
    """Speed over reading a shared prompt for each request, by its length."""
    rows: Mapping[str, list[dict]] = {card: load(name)["rows"] for card, name in cpu.RELAY.items()}
    tokens = [row["shared_tokens"] for row in rows["CPU"]]
    found = [Curve("theory, from memory traffic", "ink", [row["theory"] for row in rows["CPU"]], dashed=True)]
    found += [Curve(card, shade, [row["auto_speedup"] for row in rows[card]]) for card, shade in _CURVES.items()]
    texts = [str(each) if each < 1024 else f"{each // 1024}k" for each in tokens]
    axis = Axis([math.log2(each) for each in tokens], texts, "tokens of the shared prompt")
    note = (
        "32 requests with 128 tokens of their own. A GPU's L2 cache saves the side without sharing some of its reading."
    )
    return curves("Speed-up where a prompt is shared", found, axis, (1, 2, 5, 10, 20), note, height=220, width=THIRD)


def latent() -> Drawing:
    """The most that reading a trunk of latent rows once can give, by sharers and heads, and what was measured."""
    result = load("mla-h100")
    places = {sharers: math.log2(sharers) for sharers in (1, 2, 4, 8, 16, 32, 64)}
    found = []
    for heads, shade in _LATENT_HEADS.items():
        values = [most_gain(heads, sharers, result) for sharers in places]
        gains = {row["batch"]: speed_up(row) for row in result["rows"] if row["heads"] == heads}
        marks = [(places[sharers], gain) for batch, sharers in _SHARERS.items() if (gain := gains.get(batch))]
        found.append(Curve(f"{heads} heads", shade, values, marks=marks))
    axis = Axis(list(places.values()), [str(sharers) for sharers in places], "requests that share a trunk")
    note = (
        "Curves: what memory and arithmetic of an H100 allow where all tokens are shared. Squares: measured, over the "
        "faster of FlashMLA and FlashAttention-3, which find shared pages in the L2 cache."
    )
    title = "Latent attention: speed-up by query heads on a GPU"
    return curves(title, found, axis, (1, 2, 4, 8, 16), note, height=240)


CHARTS: Final[Mapping[str, Callable[[], Drawing]]] = MappingProxyType(
    {"performance-vllm": vllm, "performance-kernels": kernels, "performance-shared-prompt": shared_prompt}
)
OTHER_CHARTS: Final[Mapping[str, Callable[[], Drawing]]] = MappingProxyType(
    {"performance-latent": latent, "performance-predictions": predictions}
)
