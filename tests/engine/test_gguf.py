"""A GGUF file is read alone, and its rope scaling is taken over or refused: the file decides, nothing beside it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

from trunkattn.engine import LLM, SamplingParams
from trunkattn.engine.gguf_reading import gguf_read_once
from trunkattn.engine.model import inspect_model, load_tokenizer

HIDDEN, INNER, VOCAB, HEAD_DIM, CONTEXT = 64, 128, 300, 16, 256
PROMPT = torch.randint(1, 250, (120,), generator=torch.Generator().manual_seed(3)).tolist()
RAMP = [1.0, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0]


def write_gguf(
    path: Path, keys: Mapping[str, Any] | None = None, tensors: Mapping[str, Sequence[float]] | None = None
) -> Path:
    """A tiny random Llama, always the same, with a byte-level tokenizer."""
    random, writer = np.random.default_rng(0), gguf.GGUFWriter(path, "llama")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(2)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCAB)
    tokens = [*bytes_to_unicode().values(), "he"]
    tokens += [f"<pad{i}>" for i in range(VOCAB - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * VOCAB)
    writer.add_token_merges(["h e"])
    writer.add_eos_token_id(299)
    writer.add_bos_token_id(299)
    for key, value in {"rope.dimension_count": HEAD_DIM, **(keys or {})}.items():
        add = writer.add_string if isinstance(value, str) else writer.add_float32
        (writer.add_uint32 if isinstance(value, int) else add)(f"llama.{key}", value)

    def add_weight(name: str, *shape: int) -> None:
        weight = random.standard_normal(shape).astype(np.float32) * 0.3
        is_norm = name.endswith("norm.weight")
        writer.add_tensor(name, np.abs(weight) + np.float32(0.5) if is_norm else weight.astype(np.float16))

    add_weight("token_embd.weight", VOCAB, HIDDEN)
    add_weight("output_norm.weight", HIDDEN)
    add_weight("output.weight", VOCAB, HIDDEN)
    shapes = {
        "attn_q": (HIDDEN, HIDDEN),
        "attn_k": (32, HIDDEN),
        "attn_v": (32, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN),
    }
    shapes |= {"ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN), "ffn_down": (HIDDEN, INNER)}
    for block in range(2):
        for name, shape in shapes.items():
            add_weight(f"blk.{block}.{name}.weight", *shape)
        add_weight(f"blk.{block}.attn_norm.weight", HIDDEN)
        add_weight(f"blk.{block}.ffn_norm.weight", HIDDEN)
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, np.array(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


LONGROPE = {"long_factor": RAMP, "short_factor": [1.0] * 7 + [1.5], "original_max_position_embeddings": 200}
FACTORS = {"rope_factors_long.weight": RAMP, "rope_factors_short.weight": LONGROPE["short_factor"]}
SCALINGS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any] | None]] = {
    "none": ({"rope.scaling.type": "none"}, {}, None),
    "rope_freqs": ({}, {"rope_freqs.weight": RAMP}, None),
    "linear": (
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
        {},
        {"rope_type": "linear", "factor": 4.0},
    ),
    "linear, its older name": ({"rope.scale_linear": 2.0}, {}, {"rope_type": "linear", "factor": 2.0}),
    "yarn": (
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64},
        {},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    ),
    "longrope": (
        {"rope.scaling.original_context_length": 200, "rope.scaling.attn_factor": 1.25},
        FACTORS,
        {"rope_type": "longrope", "attention_factor": 1.25, **LONGROPE},
    ),
}


@pytest.mark.parametrize("kind", SCALINGS)
def test_rope_scaling_is_taken_over(tmp_path: Path, kind: str) -> None:
    keys, tensors, rope = SCALINGS[kind]
    (tmp_path / "plain").mkdir()
    write_gguf(tmp_path / "plain" / "m.gguf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", gguf_file="m.gguf", dtype=torch.float32).eval()
    if rope is not None:
        model.config.rope_parameters = {"rope_theta": 10000.0, **rope}
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    elif tensors:
        model.model.rotary_emb.inv_freq /= torch.tensor(RAMP)
    ids = torch.tensor([PROMPT])
    expected = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8, eos_token_id=None
    )
    llm = LLM(write_gguf(tmp_path / "scaled.gguf", keys, tensors), num_pages=20)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    assert llm.generate([PROMPT], params)[0].outputs[0].token_ids == expected[0, len(PROMPT) :].tolist()
    assert llm.info.max_model_len == (200 if kind == "longrope" else CONTEXT)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    r"llama\.rope\.scaling\.yarn_beta_fast": (
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_beta_fast": 16.0},
        {},
    ),
    r"llama\.rope\.scaling\.type": ({"rope.scaling.type": "su", "rope.scaling.factor": 4.0}, {}),
    r"llama\.rope\.scaling\.factor": ({"rope.scaling.factor": 4.0}, {}),
    r"rope_factors_long\.weight": ({}, FACTORS),
    r"rope_freqs\.weight, llama\.rope\.scaling\.factor": (
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
        {"rope_freqs.weight": RAMP},
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_rope_scaling_is_refused_by_name(tmp_path: Path, name: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", *REFUSED[name])
    with pytest.raises(ValueError, match=name) as error:
        inspect_model(path)
    assert str(error.value).startswith(f"model={str(path)!r}: ")


def test_a_gguf_file_is_read_without_its_neighbours(tmp_path: Path) -> None:
    alone = write_gguf(tmp_path / "alone.gguf")
    neighbours = tmp_path / "neighbours"
    neighbours.mkdir()
    path = write_gguf(neighbours / "m.gguf")
    (neighbours / "config.json").write_text(json.dumps({"model_type": "gpt2", "eos_token_id": 7}))
    (neighbours / "generation_config.json").write_text(json.dumps({"eos_token_id": 5, "temperature": 0.1}))
    (neighbours / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (neighbours / "tokenizer.json").write_text("{")
    (neighbours / "special_tokens_map.json").write_text(json.dumps({"eos_token": "h"}))
    llm, other = LLM(path, num_pages=20), LLM(alone, num_pages=20)
    assert llm.tokenizer.get_vocab() == other.tokenizer.get_vocab() and llm.tokenizer.vocab_size == VOCAB
    assert 299 in llm.engine.limits.eos_token_ids and llm.engine.limits == other.engine.limits
    assert llm.model.generation_config.to_dict() == other.model.generation_config.to_dict()
    assert load_tokenizer(inspect_model(path)).decode([VOCAB - 44]) == "he"


def test_the_header_is_read_once_and_the_library_is_left_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []

    class Counted(gguf.GGUFReader):
        def __init__(self, path: Path, *options: str) -> None:
            made.append(Path(path).resolve())
            super().__init__(path, *options)

    monkeypatch.setattr(gguf, "GGUFReader", Counted)
    table = gguf.get_tensor_name_map
    one, other = write_gguf(tmp_path / "one.gguf"), write_gguf(tmp_path / "other.gguf")
    LLM(one, num_pages=20)
    assert made == [one]
    with gguf_read_once():
        LLM(other, num_pages=20)
        LLM(other, num_pages=20)
    assert made == [one, other]  # two models within one reading
    assert gguf.GGUFReader is Counted and gguf.get_tensor_name_map is table


def test_the_header_read_once_has_the_same_fields_and_tensors(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    expected = gguf.GGUFReader(path)
    with gguf_read_once():
        assert gguf.GGUFReader(path) is gguf.GGUFReader(path)
        found = gguf.GGUFReader(path)
    assert [*found.fields] == [*expected.fields]
    for mine, theirs in zip(found.tensors, expected.tensors, strict=True):
        assert mine.name == theirs.name
        assert np.array_equal(mine.data, theirs.data)
