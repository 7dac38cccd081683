"""`attn_implementation="trunkattn"` in models that change the masks that they are given, or ask for other ones."""

import re

import pytest
import torch

transformers = pytest.importorskip("transformers")

from .door_cases import ENDS, GEMMA, HOLES, KEPT, PACKED, SMALL, TOKENS, both  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kept", [None, ENDS, HOLES])
def test_a_decoder_that_is_called_as_an_encoder_sees_all_tokens_and_no_padding(kept: torch.Tensor | None) -> None:
    theirs, ours = both("Llama", SMALL)
    batch = {"input_ids": TOKENS, "attention_mask": kept, "is_causal": False, "use_cache": False}
    asked = (KEPT if kept is None else kept).bool()
    expected, found = (model(**batch).logits[asked] for model in (theirs, ours))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_model_that_makes_another_mask_of_ours_is_refused() -> None:
    """Doge adds weights of its own to a mask of four dimensions."""
    _, model = both("Doge", SMALL | {"head_dim": 8})
    for kept in (None, ENDS):
        with pytest.raises(
            ValueError, match=re.escape("attention_mask has shape (2, 4, 17, 17): attn_implementation=")
        ):
            model(TOKENS, attention_mask=kept, use_cache=False)


SHARED = GEMMA | {
    "num_hidden_layers": 4, "layer_types": GEMMA["layer_types"] * 2, "num_kv_shared_layers": 2, "global_head_dim": 16,
    "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 50,
}  # fmt: skip


@pytest.mark.parametrize("last", [0, 1, 4])
def test_layers_that_share_keys_compute_the_last_tokens_only(last: int) -> None:
    """Gemma 4 cuts the mask of these layers to the tokens that it is asked for."""
    theirs, ours = both("Gemma4Text", SHARED)
    left = KEPT.clone()
    left[0, :5] = 0
    batch = {"input_ids": TOKENS, "logits_to_keep": last, "use_cache": False}
    for kept in (None, left):
        asked = (KEPT if kept is None else kept)[:, -last:].bool()
        expected, found = (model(attention_mask=kept, **batch).logits[asked] for model in (theirs, ours))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    packed = {"input_ids": TOKENS[:1], "position_ids": PACKED, "logits_to_keep": last, "use_cache": False}
    if last:
        with pytest.raises(ValueError, match=f"query has {last} tokens and key has 17 beside packed sequences"):
            ours(**packed)
        return
    torch.testing.assert_close(ours(**packed).logits, theirs(**packed).logits, rtol=1e-4, atol=1e-4)
