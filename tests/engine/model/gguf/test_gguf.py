"""A GGUF file is read alone, and its rope scaling is taken over or refused: the file decides, nothing beside it."""

import json
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

from trunkattn.engine import LLM, SamplingParams
from trunkattn.engine.model.gguf.config import gguf_config
from trunkattn.engine.model.gguf.header import read_header
from trunkattn.engine.model.gguf.tokenizer import gguf_tokenizer
from trunkattn.engine.model.inspection import inspect_model
from trunkattn.engine.model.loading import load_tokenizer

HIDDEN, INNER, VOCAB, HEAD_DIM, CONTEXT = 64, 128, 300, 16, 256
PROMPT = torch.randint(1, 250, (120,), generator=torch.Generator().manual_seed(3)).tolist()
RAMP = [1.0, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0]


def write_gguf(
    path: Path,
    keys: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Sequence[float]] | None = None,
    **options: Any,
) -> Path:
    """A tiny random Llama, always the same, with a byte-level tokenizer. options: of the package's writer."""
    random, writer = np.random.default_rng(0), gguf.GGUFWriter(path, "llama", **options)
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
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * VOCAB)
    writer.add_token_merges(["h e"])
    writer.add_eos_token_id(299)
    writer.add_bos_token_id(299)
    for key, value in {"rope.dimension_count": HEAD_DIM, **(keys or {})}.items():
        add = writer.add_string if isinstance(value, str) else writer.add_float32
        whole = key if key.startswith(("general.", "split.", "tokenizer.")) else f"llama.{key}"
        (writer.add_uint32 if isinstance(value, int) else add)(whole, value)

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
    "longrope, no factor of attention": (
        {"rope.scaling.original_context_length": 200, "rope.scaling.factor": 1.0},
        FACTORS,
        {"rope_type": "longrope", "attention_factor": 1.0, **LONGROPE},
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
    taken = llm.info.config.rope_parameters
    assert {**taken, **(rope or {})} == taken
    assert llm.info.max_model_len == (200 if kind.startswith("longrope") else CONTEXT)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    r"llama\.rope\.scaling\.yarn_beta_fast": (
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_beta_fast": 16.0},
        {},
    ),
    r"llama\.rope\.scaling\.type": ({"rope.scaling.type": "su", "rope.scaling.factor": 4.0}, {}),
    r"llama\.rope\.scaling\.factor": ({"rope.scaling.factor": 4.0}, {}),
    r"llama\.rope\.scaling\.attn_factor": ({"rope.scaling.attn_factor": 2.0}, {}),
    r"rope_freqs\.weight, llama\.rope\.scaling\.attn_factor": (
        {"rope.scaling.attn_factor": 2.0},
        {"rope_freqs.weight": RAMP},
    ),
    r"rope_factors_long\.weight": ({}, FACTORS),
    r"rope_factors_short\.weight, llama\.rope\.scaling\.factor": (
        {"rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 200},
        FACTORS,
    ),
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
    assert load_tokenizer(inspect_model(path).files).decode([VOCAB - 44]) == "he"


def test_the_header_has_the_fields_and_tensors_that_gguf_finds(smollm2_gguf: Path) -> None:
    expected, header = gguf.GGUFReader(smollm2_gguf), read_header(smollm2_gguf)
    assert [*header.keys] == [key for key in expected.fields if not key.startswith("GGUF.")]
    assert header.keys["tokenizer.ggml.tokens"] == 49152 and header.facts["block_count"] == 30
    assert [*header.tensors] == [tensor.name for tensor in expected.tensors]
    for tensor in expected.tensors[::40]:
        found, values = header.tensors[tensor.name], gguf.dequantize(tensor.data, tensor.tensor_type)
        assert (found.ggml_type, found.shape) == (tensor.tensor_type, tuple(reversed(tensor.shape.tolist())))
        assert np.array_equal(header.values(tensor.name), values)


UNREAD: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    r"llama\.attention\.scale=0\.5": ({"attention.scale": 0.5}, {}),
    r"llama\.attn_logit_softcapping=30\.0": ({"attn_logit_softcapping": 30.0}, {}),
    r"llama\.attention\.sliding_window=64": ({"attention.sliding_window": 64}, {}),
    r"llama\.expert_count=8": ({"expert_count": 8}, {}),
    r"llama\.attention\.value_length=32": ({"attention.value_length": 32}, {}),
    r"llama\.something_new=1": ({"something_new": 1}, {}),
    r"llama\.rope\.dimension_sections": ({"rope.dimension_sections": "4 4"}, {}),
    r"blk\.0\.attn_q_norm\.weight": ({}, {"blk.0.attn_q_norm.weight": [1.0] * 16}),
    r"blk\.1\.ffn_down\.bias": ({}, {"blk.1.ffn_down.bias": [1.0] * HIDDEN}),
    r"o_proj\.bias": ({}, {f"blk.0.attn_{name}.bias": [1.0] * 32 for name in "kv"} | {"blk.0.attn_q.bias": [1.0] * 64}),
}


@pytest.mark.parametrize("name", UNREAD)
def test_what_nobody_reads_is_refused_by_name(tmp_path: Path, name: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", *UNREAD[name])
    with pytest.raises(ValueError, match=name) as error:
        LLM(path, num_pages=20)
    assert str(error.value).startswith(f"model={str(path)!r}: ")


def test_a_header_of_a_model_that_its_tensors_are_far_too_few_for_is_refused(tmp_path: Path) -> None:
    wide = dict.fromkeys(("attention.key_length", "attention.value_length", "rope.dimension_count"), 4096)
    write_gguf(tmp_path / "model.gguf", wide)
    with pytest.raises(ValueError, match=r"describes a model of [\d,]+ weights, and its files hold [\d,]+ numbers"):
        inspect_model(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("blk.0.attn_norm.weight", "blk.1.attn_norm.weight"),
        ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.bos_token_id"),
    ],
)
def test_a_name_that_a_file_has_twice_is_refused(tmp_path: Path, name: str, other: str) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes().replace(other.encode(), name.encode()))
    with pytest.raises(ValueError, match=f"it has the (tensor|key) {name} twice; expected one value for each name"):
        inspect_model(path)


def place(path: Path, name: str) -> tuple[bytearray, int]:
    """The bytes of a file of `write_gguf`, and where those lie that say how many dimensions a tensor has."""
    content = bytearray(path.read_bytes())
    return content, content.index(name.encode()) + len(name)


MOVED: dict[str, Callable[[int], int]] = {"onto another": lambda at: at - 8192, "aside": lambda at: at + 2}


@pytest.mark.parametrize("how", MOVED)
def test_a_tensor_that_is_not_behind_the_one_before_it_is_refused(tmp_path: Path, how: str) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    content, at = place(path, "blk.1.attn_output.weight")
    offset = struct.unpack_from("<Q", content, at + 24)[0]
    struct.pack_into("<Q", content, at + 24, MOVED[how](offset))
    path.write_bytes(content)
    message = f"blk.1.attn_output.weight begins at byte {MOVED[how](offset)} of the data: expected {offset}, after"
    with pytest.raises(ValueError, match=message) as caught:
        inspect_model(path)
    assert str(caught.value).startswith(f"model={str(path)!r}: its tensor")


def test_a_tensor_of_another_type_leaves_no_gap(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    content, at = place(path, "blk.0.attn_q.weight")
    struct.pack_into("<I", content, at + 20, gguf.GGMLQuantizationType.Q8_0)  # fewer bytes than float16
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"attn_k\.weight begins at byte \d+ of the data: expected \d+"):
        inspect_model(path)


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, 2**32 - 1, "4294967295 dimensions: expected at most 4"),
        (4, HIDDEN // 2, "instead of|begins at byte"),
        (20, gguf.GGMLQuantizationType.Q6_K, "rows of 64 numbers: expected whole blocks of 256"),
    ],
)
def test_a_tensor_of_another_shape_or_type_is_refused(tmp_path: Path, at: int, value: int, message: str) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    content, start = place(path, "blk.0.attn_q.weight")
    struct.pack_into("<I", content, start + at, value)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        inspect_model(path)


@pytest.mark.parametrize("alignment", [0, 24, "32"])
def test_an_alignment_is_a_power_of_two(tmp_path: Path, alignment: Any) -> None:
    path = write_gguf(tmp_path / "m.gguf", {"general.alignment": alignment})
    with pytest.raises(ValueError, match=rf"general\.alignment={alignment!r}: expected a power of two"):
        inspect_model(path)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    content, at = place(path, "blk.0.ffn_gate.weight")
    struct.pack_into("<QQ", content, at + 4, INNER, HIDDEN)
    path.write_bytes(content)
    with pytest.raises(
        ValueError, match=r"mlp\.gate_proj\.weight of shape \[64, 128\] instead of \[128, 64\]; expected"
    ):
        LLM(path, num_pages=20)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("block_count", 10**6, "expected at most 21, the number of its tensors"),
        ("attention.head_count_kv", 0, "a whole number above 0"),
        ("attention.head_count", 4.0, "a whole number above 0"),
        ("rope.freq_base", "x", "a number above 0"),
        ("rope.freq_base", -1.0, "a number above 0"),
        ("attention.layer_norm_rms_epsilon", float("inf"), "a number of at least 0"),
    ],
)
def test_a_number_that_no_model_has_is_refused_by_its_key(tmp_path: Path, key: str, value: Any, expected: str) -> None:
    keys = {**read_header(write_gguf(tmp_path / "m.gguf")).keys, f"llama.{key}": value}
    with pytest.raises(ValueError, match=re.escape(f"its key llama.{key}={value!r}: expected")) as caught:
        gguf_config(read_header(tmp_path / "m.gguf")._replace(keys=keys))
    assert expected in str(caught.value)


@pytest.mark.parametrize("value", [None, 5, [1.0]])
def test_a_tokenizer_without_its_merges_is_refused_by_the_key(tmp_path: Path, value: Any) -> None:
    header = read_header(write_gguf(tmp_path / "m.gguf"))
    keys = {**header.keys, "tokenizer.ggml.merges": value}
    with pytest.raises(ValueError, match=r"tokenizer\.ggml\.merges is (missing|5|\[1\.0\]): expected a list of texts"):
        gguf_tokenizer(header._replace(keys=keys))


def test_keys_that_change_nothing_pass(tmp_path: Path) -> None:
    keys = {"attention.causal": 1, "expert_count": 0, "pooling_type": 0, "attention.key_length": 16}
    keys |= {"rope.scaling.type": "none", "rope.scaling.factor": 1.0, "rope.scaling.attn_factor": 1.0}  # type: ignore
    LLM(write_gguf(tmp_path / "m.gguf", keys, {"rope_freqs.weight": [1.0] * 8}), num_pages=20)


def test_the_package_gguf_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map", "dequantize")}
    seen: list[bool] = []
    table = gguf.get_tensor_name_map

    def watched(*arguments: Any) -> Any:
        seen.append(gguf.GGUFReader is names["GGUFReader"])
        return table(*arguments)

    monkeypatch.setattr(gguf, "get_tensor_name_map", watched)
    LLM(write_gguf(tmp_path / "m.gguf"), num_pages=20)
    assert seen and all(seen) and len(seen) <= 3, "the table of names is made once for the model and each first child"
    assert gguf.get_tensor_name_map is watched


def test_tokens_that_end_a_turn_end_answers(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {"tokenizer.ggml.eot_token_id": 298})
    assert LLM(path, num_pages=20).engine.limits.eos_token_ids == {298, 299}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("general.type", "adapter"),
        ("split.count", 3),
        ("tokenizer.ggml.remove_extra_whitespaces", 1),
        ("tokenizer.ggml.new_rule", 1),
    ],
)
def test_a_file_that_is_no_whole_model_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{key}={value!r}"):
        inspect_model(write_gguf(tmp_path / "m.gguf", {key: value}))


@pytest.mark.parametrize("small_first_shard", [False, True])
def test_each_part_of_a_model_is_refused_as_one(tmp_path: Path, small_first_shard: bool) -> None:
    """Only the first says which model it is, and it may hold no tensor."""
    write_gguf(tmp_path / "m.gguf", split_max_tensors=9, small_first_shard=small_first_shard)
    parts = sorted(tmp_path.glob("m-0000*-of-0000*.gguf"))
    assert len(parts) == 3 + small_first_shard
    for part in parts:
        with pytest.raises(ValueError, match=f"split.count={len(parts)} says that it is one part of a model; merge"):
            inspect_model(part)


def test_a_file_that_names_no_architecture_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes().replace(b"general.architecture", b"general.architectura"))
    with pytest.raises(ValueError, match=re.escape("it has no key general.architecture; expected")):
        inspect_model(path)


SAMPLING = {"temp": 0.25, "top_k": 20, "top_p": 0.5, "min_p": 0.125, "penalty_repeat": 1.0, "penalty_last_n": 64}


def test_tokens_are_drawn_as_a_file_says(tmp_path: Path) -> None:
    keys = {f"general.sampling.{name}": value for name, value in SAMPLING.items()}
    llm = LLM(write_gguf(tmp_path / "m.gguf", keys), num_pages=20)
    expected = SamplingParams(temperature=0.25, top_k=20, top_p=0.5, min_p=0.125)
    assert llm.get_default_sampling_params() == expected


@pytest.mark.parametrize(
    ("key", "value"), [("penalty_repeat", 1.5), ("mirostat", 2), ("sequence", "kp"), ("new", 1), ("temp", -1.0)]
)
def test_drawing_that_nobody_follows_is_refused_by_name(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"general\.sampling\.(\*: temperature|{key})={value!r}"):
        inspect_model(write_gguf(tmp_path / "m.gguf", {f"general.sampling.{key}": value}))


def test_the_name_of_a_model_decides_nothing(tmp_path: Path) -> None:
    # transformers takes the default window of another type for a file of this name
    assert inspect_model(write_gguf(tmp_path / "m.gguf", {"general.name": "mistral"})).config.model_type == "llama"
