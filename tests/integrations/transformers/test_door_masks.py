"""`attn_implementation="trunkattn"` in models that change the masks that they are given, or ask for other ones."""

import copy
import re
from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

from trunkattn.integrations.transformers import attend, register  # noqa: E402

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
    """Gemma 4 cuts the mask of these layers to the tokens that it is asked for, if transformers is new enough."""
    theirs, ours = both("Gemma4Text", SHARED)
    lengths: list[int] = []
    attention = next(module for name, module in theirs.named_modules() if name.endswith("layers.3.self_attn"))
    attention.register_forward_hook(lambda module, given, out: lengths.append(out[0].shape[1]))
    left = KEPT.clone()
    left[0, :5] = 0
    batch = {"input_ids": TOKENS, "logits_to_keep": last, "use_cache": False}
    for kept in (None, left):
        asked = (KEPT if kept is None else kept)[:, -last:].bool()
        expected, found = (model(attention_mask=kept, **batch).logits[asked] for model in (theirs, ours))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    packed = {"input_ids": TOKENS[:1], "position_ids": PACKED, "logits_to_keep": last, "use_cache": False}
    if lengths[-1] == last:
        with pytest.raises(ValueError, match=f"query has {last} tokens and key has 17 beside packed sequences"):
            ours(**packed)
        return
    torch.testing.assert_close(ours(**packed).logits, theirs(**packed).logits, rtol=1e-4, atol=1e-4)


def pair(model: str, config: Any) -> tuple[nn.Module, nn.Module]:
    """A model with eager attention, and the same with ours."""
    register()
    torch.manual_seed(0)
    theirs = getattr(transformers, model)._from_config(config, attn_implementation="eager").eval()
    ours = copy.deepcopy(theirs)
    ours.set_attn_implementation("trunkattn")
    return theirs, ours


def test_the_padding_of_an_encoder_is_read_by_its_convolutions_too() -> None:
    """A mask of integers would hide from them the tokens that it keeps."""
    sizes = {name: SMALL[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "head_dim")}
    of_sound = sizes | {
        "num_attention_heads": 4, "num_key_value_heads": 4, "num_mel_bins": 16, "subsampling_conv_channels": 8,
        "conv_kernel_size": 5,
    }  # fmt: skip
    theirs, ours = pair("LasrEncoder", transformers.LasrEncoderConfig(**of_sound))
    kept = torch.ones(2, 96, dtype=torch.long)
    kept[0, 60:] = 0
    sound = torch.randn(2, 96, 16, generator=torch.Generator().manual_seed(0))
    expected, found = (model(sound, attention_mask=kept).last_hidden_state for model in (theirs, ours))
    torch.testing.assert_close(found[0, :10], expected[0, :10], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-4)


def test_the_padding_of_an_image_is_read_by_its_pooling_too() -> None:
    sizes = {name: SMALL[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")}
    config = transformers.Siglip2VisionConfig(**sizes, num_attention_heads=4, num_patches=16, patch_size=4)
    theirs, ours = pair("Siglip2VisionModel", config)
    kept = torch.ones(2, 16, dtype=torch.long)
    kept[0, 12:] = 0
    batch = {
        "pixel_values": torch.randn(2, 16, 48, generator=torch.Generator().manual_seed(0)),
        "pixel_attention_mask": kept,
        "spatial_shapes": torch.tensor([[3, 4], [4, 4]]),
    }
    expected, found = (model(**batch).pooler_output for model in (theirs, ours))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_mask_that_is_not_causal_is_refused_in_a_layer_that_is() -> None:
    q = torch.randn(2, 2, 5, 16)
    kept = torch.ones(2, 1, 1, 5, dtype=torch.bool)
    with pytest.raises(ValueError, match=re.escape("attention_mask has shape (2, 1, 1, 5): attn_implementation=")):
        attend(nn.Module(), q, q, q, kept)


def test_queries_that_all_rows_ask() -> None:
    """GraniteSpeech has learned them once."""
    q, k = torch.randn(1, 2, 3, 16), torch.randn(4, 2, 5, 16)
    found, _ = attend(nn.Module(), q, k, k, None, is_causal=False)
    expected, _ = attend(nn.Module(), q.repeat(4, 1, 1, 1), k, k, None, is_causal=False)
    assert torch.equal(found, expected)
