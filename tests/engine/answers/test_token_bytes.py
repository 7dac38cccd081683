"""The bytes of tokens in every kind of vocabulary: put together they are the text."""

from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trunkattn.engine.answers.token_bytes import TokenBytes

TEXT = "So true, naïve 😀 x"


def byte_level() -> Tokenizer:
    alphabet = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab={**alphabet, "Ġt": 256}, merges=[("Ġ", "t")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentencepiece() -> Tokenizer:
    vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}}
    for piece in ["▁", *"Sotruenvx,", "▁true", "true"]:
        vocab.setdefault(piece, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def metaspace() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), *((piece, -1.0) for piece in ["▁", *TEXT])], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def words_with_ends() -> Tokenizer:
    """As GPT-1 has them: the last token of a word writes the space behind it, unless it ends the text."""
    pieces = ["<unk>", *TEXT, *(f"{letter}</w>" for letter in TEXT)]
    vocab = {piece: place for place, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.BPE(vocab, [], end_of_word_suffix="</w>", unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    return tokenizer


@pytest.fixture(params=[byte_level, sentencepiece, metaspace, words_with_ends])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    made = request.param()
    made.add_special_tokens(["<end>"])
    made.add_tokens([AddedToken(" kept as is▁", normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")


def test_the_bytes_of_a_texts_tokens_are_the_text(tokenizer: Any) -> None:
    token_bytes = TokenBytes(tokenizer)
    written = [token_bytes.of(token_id) for token_id in tokenizer(TEXT, add_special_tokens=False)["input_ids"]]
    assert None not in written
    assert b"".join(written).decode().strip(" ") == TEXT


def test_added_tokens_are_their_text(tokenizer: Any) -> None:
    token_bytes, added = TokenBytes(tokenizer), tokenizer.get_added_vocab()
    for text in ("<end>", " kept as is▁"):
        assert token_bytes.of(added[text]) == text.encode()


def test_a_token_keeps_its_space_and_a_byte_its_value() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=sentencepiece())
    token_bytes, vocab = TokenBytes(tokenizer), tokenizer.get_vocab()
    assert token_bytes.of(vocab["▁true"]) == b" true" and token_bytes.of(vocab["true"]) == b"true"
    assert token_bytes.of(vocab["<0xF0>"]) == b"\xf0"


def test_rows_without_a_token_have_no_bytes(tokenizer: Any) -> None:
    assert TokenBytes(tokenizer).of(len(tokenizer) + 5) is None
    assert TokenBytes(None).of(3) is None


class PythonTokenizer:
    """A tokenizer in Python, which raises for a row of the logits that is padding."""

    def decode(self, token_ids: list[int]) -> str:
        return "".join("ab"[token_id] for token_id in token_ids)


def test_rows_without_a_token_of_a_tokenizer_in_python_have_no_bytes() -> None:
    token_bytes = TokenBytes(PythonTokenizer())
    assert token_bytes.of(1) == b"b" and token_bytes.of(2) is None
