"""What models of transformers are refused for before they compute, and some of them before they are made."""

import re
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from trunkattn.integrations.transformers import register  # noqa: E402

from .door_cases import TOKENS, both  # noqa: E402

pytestmark = pytest.mark.slow

SIZES = {"vocab_size": 50, "hidden_size": 32}
GLOBAL = {"num_layers": 1, "num_heads": 4, "attention_types": [[["global"], 1]]}
VISION = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 32}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("GPT2", {"vocab_size": 50, "n_embd": 32, "n_layer": 1, "n_head": 4}),
        ("Llama", SIZES | {"num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}),
    ],
)
def test_attention_weights_are_refused(name: str, options: dict[str, Any]) -> None:
    """GPT-2 hands no keyword on to its attention, and transformers would return an empty tuple of weights."""
    theirs, ours = both(name, options)
    assert theirs(TOKENS, output_attentions=True).attentions[0].shape == (2, 4, 17, 17)
    with pytest.raises(ValueError, match="output_attentions is given: attn_implementation='trunkattn' has none"):
        ours(TOKENS, output_attentions=True)
    torch.testing.assert_close(ours(TOKENS, output_attentions=False).logits, theirs(TOKENS).logits)
    ours.set_attn_implementation("eager")
    assert ours(TOKENS, output_attentions=True).attentions[0].shape == (2, 4, 17, 17)


@pytest.mark.parametrize(
    ("model", "config", "options"),
    [
        ("FalconForCausalLM", "FalconConfig", SIZES | {"num_hidden_layers": 1, "num_attention_heads": 4}),
        ("GPTNeoModel", "GPTNeoConfig", SIZES | GLOBAL),
        ("SamVisionModel", "SamVisionConfig", VISION),
    ],
)
def test_layers_with_a_table_of_attentions_of_their_own_are_refused(
    model: str, config: str, options: dict[str, Any]
) -> None:
    register()
    made = getattr(transformers, config)(**options)
    made._attn_implementation = "trunkattn"
    message = f"layers of {config} take no attention but their own: attn_implementation='trunkattn' is none of theirs"
    for _ in range(2):
        with pytest.raises(ValueError, match=re.escape(message)):
            getattr(transformers, model)(made)
    made._attn_implementation = "eager"
    getattr(transformers, model)(made)
