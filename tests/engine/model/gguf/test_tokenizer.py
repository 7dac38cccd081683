"""A byte-level tokenizer of a GGUF file makes the tokens of the model that the file was made from."""

from pathlib import Path
from typing import Any

import gguf
import pytest
from transformers.convert_slow_tokenizer import bytes_to_unicode

from trunkattn.engine.model.gguf.header import read_header
from trunkattn.engine.model.gguf.tokenizer import gguf_tokenizer

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
USER, FIRST, SPACES = "<\N{FULLWIDTH VERTICAL LINE}User 1>", "<\N{FULLWIDTH VERTICAL LINE}first>", "   "
BYTES = bytes_to_unicode()
TOKENS = [*BYTES.values(), "ab", "ĠĠ", "abc", "12", USER, FIRST, SPACES]
TYPES = [NORMAL] * (len(TOKENS) - 3) + [CONTROL, CONTROL, USER_DEFINED]


def tokenizer_of(path: Path, pre: str | None, add_bos: bool | None = None) -> Any:
    """The tokenizer of a file with all bytes, three merges, and three tokens that a text holds as a whole."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types(TYPES)
    writer.add_token_merges(["a b", "Ġ Ġ", "1 2"])
    writer.add_bos_token_id(TOKENS.index(FIRST))
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return gguf_tokenizer(read_header(path))


def pieces(tokenizer: Any, text: str) -> list[str]:
    return [TOKENS[token_id] for token_id in tokenizer(text)["input_ids"]]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["ab", "Ġ", "Ġ", "12", "ab"]),  # the last space goes with the word after it, here a number
        ("smollm", ["ab", "ĠĠ", "1", "2", "ab"]),  # digits stand alone, so both spaces go together
        ("qwen2", ["ab", "Ġ", "Ġ", "1", "2", "ab"]),
        ("stablelm2", ["ab", "Ġ", "Ġ", "1", "2", "ab"]),
        ("llama-bpe", ["ab", "Ġ", "Ġ", "12", "ab"]),  # up to three digits
        ("chatglm-bpe", ["ab", "Ġ", "Ġ", "12", "ab"]),
    ],
)
def test_a_text_is_split_as_the_file_says(tmp_path: Path, pre: str, expected: list[str]) -> None:
    assert pieces(tokenizer_of(tmp_path / "m.gguf", pre, add_bos=False), "ab  12ab") == expected


@pytest.mark.parametrize(("pre", "said"), [("default", "is 'default'"), ("new", "is 'new'"), (None, "it has no key")])
def test_an_unknown_way_to_split_is_refused_by_name(tmp_path: Path, pre: str | None, said: str) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.ggml\.pre") as error:
        tokenizer_of(tmp_path / "m.gguf", pre)
    assert said in str(error.value)


def test_tokens_that_a_text_holds_as_a_whole_stay_whole(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path / "m.gguf", "deepseek-r1-qwen", add_bos=True)
    assert pieces(tokenizer, f"{USER}ab{SPACES}c") == [FIRST, USER, "ab", SPACES, "c"]
    assert len(tokenizer) == len(TOKENS) and tokenizer.bos_token_id == TOKENS.index(FIRST)
    token_ids = tokenizer(f"{USER}é{SPACES}")["input_ids"]
    assert tokenizer.decode(token_ids) == f"{FIRST}{USER}é{SPACES}"
    assert tokenizer.decode(token_ids, skip_special_tokens=True) == f"é{SPACES}"


@pytest.mark.parametrize(("pre", "expected"), [("llama-bpe", ["abc"]), ("qwen2", ["ab", "c"])])
def test_some_vocabularies_take_whole_pieces_without_merges(tmp_path: Path, pre: str, expected: list[str]) -> None:
    assert pieces(tokenizer_of(tmp_path / "m.gguf", pre, add_bos=False), "abc") == expected


@pytest.mark.parametrize(
    ("pre", "add_bos", "expected"),
    [("llama-bpe", None, [FIRST, "ab"]), ("llama-bpe", False, ["ab"]), ("qwen2", None, ["ab"])],
)
def test_the_first_token_of_a_text_is_the_vocabularys(
    tmp_path: Path, pre: str, add_bos: bool | None, expected: list[str]
) -> None:
    assert pieces(tokenizer_of(tmp_path / "m.gguf", pre, add_bos), "ab") == expected


SPACE, WHOLE = "\N{LOWER ONE EIGHTH BLOCK}", "<u>"
PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), f"{SPACE}a", SPACE, "a", WHOLE]


def sentencepiece_of(path: Path, architecture: str, space: bool | None) -> Any:
    """The tokenizer of a file with SentencePiece's bytes, that names no token by its id."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(PIECES)
    writer.add_token_scores([float(-place) for place in range(len(PIECES))])
    writer.add_token_types([2, CONTROL, CONTROL] + [6] * 256 + [NORMAL] * 3 + [USER_DEFINED])
    if space is not None:
        writer.add_add_space_prefix(space)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return gguf_tokenizer(read_header(path))


@pytest.mark.parametrize("architecture", ["llama", "phi3", "gemma2", "gemma3"])
@pytest.mark.parametrize("space", [True, False, None])
def test_a_space_before_a_text_is_the_files(tmp_path: Path, architecture: str, space: bool | None) -> None:
    tokenizer = sentencepiece_of(tmp_path / "m.gguf", architecture, space)
    has_space = space if space is not None else architecture in ("llama", "phi3")
    first = f"{SPACE}a" if has_space else "a"
    spaced = [SPACE, f"{SPACE}a"] if has_space else [f"{SPACE}a"]
    expected = {"a": [first], " a": spaced, f"{WHOLE}a": [WHOLE, first], f"{WHOLE} a": [WHOLE, *spaced]}
    for text, pieces_of_text in expected.items():
        token_ids = tokenizer(text)["input_ids"]
        assert [PIECES[token_id] for token_id in token_ids] == ["<s>", *pieces_of_text]
        if WHOLE not in text:
            assert tokenizer.decode(token_ids, skip_special_tokens=True) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (1, 2, 0)
