"""`attn_implementation="trunkattn"` where keys are cached: generation, in pieces and from padded prompts."""

from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

from .door_cases import CHUNKS, IN_CHUNKS, KEPT, MODELS, PACKED, SMALL, TOKENS, WINDOW, both  # noqa: E402

pytestmark = pytest.mark.slow
STATIC = "the cache has room for keys after the last query"


@pytest.mark.parametrize("padding", [0, 4])
def test_generation_continues_a_cache(padding: int) -> None:
    theirs, ours = both("Llama", SMALL)
    kept = KEPT.clone()
    kept[0, :padding] = 0
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": kept}
    assert torch.equal(ours.generate(TOKENS, **options), theirs.generate(TOKENS, **options))


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Llama4Text"])
def test_caches_that_grow_and_caches_that_do_not(name: str) -> None:
    """A prompt in two pieces, then tokens one by one, beyond a window; chunks do not go on from a cache."""
    config = {"Llama": SMALL, "Mistral": WINDOW, "Llama4Text": CHUNKS}[name]
    theirs, ours = both(name, config)

    def logits(model: nn.Module, cache: Any, masked: bool) -> torch.Tensor:
        found = []
        for start, end in ((0, 4), (4, 8), (8, 9), (9, 10)):
            kept = {"attention_mask": torch.ones(2, end, dtype=torch.long)} if masked else {}
            found.append(model(TOKENS[:, start:end], past_key_values=cache, **kept).logits)
        return torch.cat(found, 1)

    for masked in (False, True):
        with torch.no_grad():
            with pytest.raises(ValueError, match=STATIC):
                logits(ours, transformers.StaticCache(config=ours.config, max_cache_len=20), masked)
            if name == "Llama4Text":
                with pytest.raises(ValueError, match=f"{IN_CHUNKS}keys are cached"):
                    logits(ours, transformers.DynamicCache(config=ours.config), masked)
                continue
            expected, found = (
                logits(model, transformers.DynamicCache(config=model.config), masked) for model in (theirs, ours)
            )
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "compiled"), [("Llama", False), ("Mistral", False), ("GptOss", False), ("GptOss", True)]
)
def test_padded_prompts_go_on_from_a_cache(name: str, compiled: bool) -> None:
    """As `generate` pads a batch: on the left, one row by more than the first piece; then beyond a window. GptOss has
    layers of both kinds, and is compiled too."""
    config = {"Llama": SMALL, "Mistral": WINDOW, "GptOss": MODELS["GptOss"]}[name]
    theirs, ours = both(name, config)
    kept = KEPT.clone()
    kept[0, :3], kept[1, :6] = 0, 0

    def logits(model: nn.Module, forward: Any) -> torch.Tensor:
        cache, found = transformers.DynamicCache(config=model.config), []
        for start, end in ((0, 4), (4, 9), (9, 10), (10, 11), (11, 17)):
            positions = (kept[:, :end].cumsum(1) - 1).clamp(min=0)[:, start:]
            batch = {"attention_mask": kept[:, :end], "position_ids": positions, "past_key_values": cache}
            found.append(forward(TOKENS[:, start:end], **batch).logits)
        return torch.cat(found, 1)[kept.bool()]

    with torch.no_grad():
        forward = torch.compile(ours, backend="aot_eager", dynamic=True) if compiled else ours
        torch.testing.assert_close(logits(ours, forward), logits(theirs, theirs), rtol=1e-4, atol=1e-4)


def test_packed_sequences_beside_a_new_cache_are_refused() -> None:
    """transformers then looks at no position ids, and makes a plain causal mask."""
    _, model = both("Llama", SMALL)
    with pytest.raises(ValueError, match=r"position_ids\[8\]=0: expected 8, .* or use_cache=False"):
        model(input_ids=TOKENS[:1], position_ids=PACKED)
