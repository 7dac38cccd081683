"""A tree at the door of transformers: models that would lose it, or its positions, refuse it before they compute."""

import copy
import pickle
import re
from typing import Any

import pytest
import torch
from torch import nn

from trunkattn import PrefixTree

transformers = pytest.importorskip("transformers")

from trunkattn.integrations.transformers import attend, register  # noqa: E402

from .door_cases import MODELS, SMALL, TOKENS, both  # noqa: E402

pytestmark = pytest.mark.slow

TREE = PrefixTree.from_segments([-1, 0, 0], [4, 5, 8])
PACKED = TREE.pack()
BATCH = {"input_ids": TOKENS[:1], "position_ids": PACKED.position_ids[None], "tree": TREE}
TEXT = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
WHISPER = TEXT | {
    "d_model": 32, "decoder_layers": 1, "decoder_attention_heads": 4, "decoder_ffn_dim": 48,
    "decoder_start_token_id": 1,
}  # fmt: skip
SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}


def model_of(name: str, config: Any) -> nn.Module:
    register()
    made: nn.Module = getattr(transformers, name)._from_config(config, attn_implementation="trunkattn")
    return made.eval()


@pytest.mark.parametrize("positions", [True, False])
@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("SiglipTextModel", lambda: transformers.SiglipTextConfig(**TEXT, projection_size=32)),
        ("Siglip2TextModel", lambda: transformers.Siglip2TextConfig(**TEXT, projection_size=32)),
        ("NemotronForCausalLM", lambda: transformers.NemotronConfig(**SMALL | {"head_dim": 8})),
        ("StableLmModel", lambda: transformers.StableLmConfig(**SMALL | {"head_dim": 8})),
        ("MambaModel", lambda: transformers.MambaConfig(hidden_size=32, num_hidden_layers=1, vocab_size=50)),
    ],
)
def test_a_model_that_drops_its_keywords_refuses_a_tree(name: str, config: Any, positions: bool) -> None:
    """Mamba never asks for our attention, which could not refuse it either."""
    model = model_of(name, config())
    batch = BATCH if positions else {key: value for key, value in BATCH.items() if key != "position_ids"}
    message = f"tree is given and {name} hands no such keyword on to its attention, which would let its branches see"
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with pytest.raises(ValueError, match=message):
            each(**batch)
    assert model(TOKENS).last_hidden_state.shape[:2] == (2, 17) if name.endswith("Model") else model(TOKENS)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("LlamaModel", lambda: transformers.LlamaConfig(**SMALL)),
        ("GPTBigCodeModel", lambda: transformers.GPTBigCodeConfig(**TEXT)),
        ("CLIPTextModel", lambda: transformers.CLIPTextConfig(**TEXT)),
        ("WhisperForCausalLM", lambda: transformers.WhisperConfig(**WHISPER)),
        (
            "Qwen2VLTextModel",
            lambda: transformers.Qwen2VLTextConfig(**SMALL | {"head_dim": 8}, rope_parameters=SECTIONS),
        ),
    ],
)
def test_a_tree_without_its_positions_is_refused(name: str, config: Any) -> None:
    """In models that do not hand them on to attention, too."""
    model = model_of(name, config())
    with pytest.raises(ValueError, match=re.escape("position_ids is None and tree is given: expected tree.pack().pos")):
        model(input_ids=TOKENS[:1], tree=TREE)
    if name != "Qwen2VLTextModel":
        with pytest.raises(ValueError, match=r"position_ids\[9\]=9: expected 4, the number of the token's ancestors"):
            model(input_ids=TOKENS[:1], position_ids=torch.arange(17)[None], tree=TREE)
    alone = [model(TOKENS[:1, own])[0][0] for own in TREE.sequence_indices()]
    for found, expected in zip(TREE.unpack(model(**BATCH)[0][0]), alone, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_positions_are_taken_by_their_place_too() -> None:
    _, model = both("Llama", SMALL)
    by_name = model(**BATCH, use_cache=False).logits
    assert torch.equal(model(TOKENS[:1], None, BATCH["position_ids"], tree=TREE, use_cache=False).logits, by_name)


def test_what_is_no_tree_is_refused() -> None:
    _, model = both("Llama", SMALL)
    for tree in ([[1, 2]], PACKED):
        with pytest.raises(TypeError, match=f"tree is a {type(tree).__name__}: expected a trunkattn.PrefixTree"):
            model(**BATCH | {"tree": tree})
        q = torch.zeros(1, 4, 17, 16)
        with pytest.raises(TypeError, match=f"tree is a {type(tree).__name__}: expected a trunkattn.PrefixTree"):
            attend(nn.Module(), q, q, q, None, tree=tree, position_ids=BATCH["position_ids"])  # type: ignore[arg-type]


def test_a_model_that_has_been_given_another_attention_refuses_a_tree() -> None:
    _, model = both("Llama", SMALL)
    model.set_attn_implementation("sdpa")
    message = (
        "tree is given and LlamaForCausalLM has attn_implementation='sdpa', which takes none: expected 'trunkattn'"
    )
    with pytest.raises(ValueError, match=message):
        model(**BATCH)
    model.set_attn_implementation("trunkattn")
    assert len(model._forward_pre_hooks) == 1
    assert model(**BATCH).logits.shape == (1, 17, 50)


@pytest.mark.parametrize("asked", ["trunkattn", {"": "trunkattn"}])
def test_a_model_that_takes_no_attention_but_its_own_refuses_a_tree(asked: str | dict[str, str]) -> None:
    """transformers only warns that it leaves such a model as it is, and the model takes any keyword."""
    register()
    model = transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=50, hidden_size=32, n_layer=1, n_head=4))
    model.set_attn_implementation(asked)
    batch = {"input_ids": BATCH["input_ids"]}
    with pytest.raises(ValueError, match="tree is given and BloomForCausalLM has attn_implementation='eager', which"):
        model(**batch, tree=BATCH["tree"])
    assert model(**batch).logits.shape == (1, 17, 50)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("RobertaForCausalLM", lambda: transformers.RobertaConfig(**TEXT, is_decoder=True)),
        ("XLMRobertaForCausalLM", lambda: transformers.XLMRobertaConfig(**TEXT, is_decoder=True)),
        (
            "Kosmos2_5Model",
            lambda: transformers.Kosmos2_5Config(
                text_config={"vocab_size": 50, "embed_dim": 32, "layers": 1, "attention_heads": 4, "ffn_dim": 48},
                vision_config={
                    "hidden_size": 32,
                    "intermediate_size": 48,
                    "num_hidden_layers": 1,
                    "num_attention_heads": 4,
                },
            ),
        ),
    ],
)
def test_a_model_that_numbers_tokens_from_its_padding_on_refuses_a_tree(name: str, config: Any) -> None:
    message = "numbers tokens from its padding_idx + 1 on, and those of a tree from 0 on: expected a batch without it"
    with pytest.raises(ValueError, match=re.escape(message)):
        model_of(name, config())(**BATCH)


@pytest.mark.parametrize("name", ["OPT", "BioGpt", "GPT2"])
def test_a_model_that_adds_an_offset_to_positions_takes_a_tree(name: str) -> None:
    """OPT and BioGPT have learned positions that begin at 2, and add it to those that they are given."""
    theirs, ours = both(name, TEXT | {"ffn_dim": 48, "word_embed_proj_dim": 32})
    alone = [theirs(TOKENS[:1, own]).logits[0] for own in TREE.sequence_indices()]
    for found, expected in zip(TREE.unpack(ours(**BATCH, use_cache=False).logits[0]), alone, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_many_models_over_trees_are_compiled_whole(name: str) -> None:
    """More of them than torch compiles one function for, if no other test has compiled it before."""
    torch.compiler.reset()
    _, ours = both(name, MODELS[name] | {"num_hidden_layers": 1, "layer_types": ["full_attention"]})
    expected = ours(**BATCH, use_cache=False).logits
    for _ in range(10):
        compiled = torch.compile(copy.deepcopy(ours), backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(**BATCH, use_cache=False).logits, expected, rtol=1e-4, atol=1e-4)
        assert compiled(TOKENS, use_cache=False).logits.shape == (2, 17, 50)
