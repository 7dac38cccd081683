"""Incremental text: whole characters, as decoding at once gives them, and stop strings wherever tokens break them."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkattn.engine.answers.detokenizer import Detokenizer


class ByteTokenizer:
    """One token per byte of UTF-8; token 256 is special."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return bytes(token_id for token_id in token_ids if token_id < 256).decode(errors="replace")


BYTES = ByteTokenizer()
TEXTS = st.text(alphabet="aé日🙂 b", max_size=12)


def feed(detokenizer: Detokenizer, token_ids: Sequence[int]) -> tuple[list[str], str | None]:
    """The text after each token, up to the first stop string, and that string."""
    texts = []
    for token_id in token_ids:
        stop = detokenizer.append(token_id)
        texts.append(detokenizer.text)
        if stop is not None:
            return texts, stop
    detokenizer.flush()
    return [*texts, detokenizer.text], None


@given(prompt=TEXTS, answer=TEXTS)
def test_text_is_that_of_decoding_at_once(prompt: str, answer: str) -> None:
    texts, _ = feed(Detokenizer(BYTES, BYTES.encode(prompt)), BYTES.encode(answer))
    assert texts[-1] == answer
    assert all(answer.startswith(text) for text in texts), "a text once shown never changes"


@given(prompt=TEXTS, answer=TEXTS, stop=st.lists(st.text(alphabet="aé日 b", min_size=1, max_size=4), max_size=3))
def test_text_ends_before_the_first_stop_string(prompt: str, answer: str, stop: list[str]) -> None:
    detokenizer = Detokenizer(BYTES, BYTES.encode(prompt), stop)
    texts, found = feed(detokenizer, BYTES.encode(answer))
    # The first stop string to be complete ends the answer, where tokens are no longer than characters.
    ends = [answer.find(string) + len(string) for string in stop if string in answer]
    if not ends:
        assert found is None and texts[-1] == answer
    else:
        assert found is not None and texts[-1] == answer[: min(ends)][: answer[: min(ends)].find(found)]
    assert all(texts[-1].startswith(text) for text in texts), "what might become a stop string is never shown"


def test_a_stop_string_across_tokens_is_held_back() -> None:
    detokenizer = Detokenizer(BYTES, [], ["END"])
    shown = []
    for token_id in BYTES.encode("xEN ENDy"):
        if detokenizer.append(token_id):
            break
        shown.append(detokenizer.text)
    assert shown == ["", "", "x", "xE", "xEN", "xEN "] and detokenizer.text == "xEN "


def test_part_of_a_character_is_shown_only_at_the_end() -> None:
    detokenizer = Detokenizer(BYTES, [])
    for token_id in BYTES.encode("a🙂")[:-1]:
        detokenizer.append(token_id)
        assert detokenizer.text == "a"
    detokenizer.flush()
    assert detokenizer.text == "a\N{REPLACEMENT CHARACTER}"


def test_special_tokens_are_no_text() -> None:
    texts, _ = feed(Detokenizer(BYTES, [256, 65]), [66, 256, 67])
    assert texts == ["B", "B", "BC", "BC"]


@pytest.mark.parametrize(
    "text", ["Hello, wörld! 日本語 🙂🇩🇪 ok", " leading", "tabs\t\n\nlines ", "a  b   c", "👩‍👩‍👧‍👦 family"]
)
def test_smollm2_tokens_that_split_characters(smollm2_tokenizer: Any, text: str) -> None:
    token_ids = smollm2_tokenizer(text)["input_ids"]
    texts, _ = feed(Detokenizer(smollm2_tokenizer, smollm2_tokenizer("The prompt.")["input_ids"]), token_ids)
    assert texts[-1] == text
    assert all(text.startswith(shown) for shown in texts)


@given(data=st.data())
def test_random_tokens_of_smollm2_become_the_text_of_decode(smollm2_tokenizer: Any, data: st.DataObject) -> None:
    token_ids = data.draw(st.lists(st.integers(3, 49000), min_size=1, max_size=20))
    texts, _ = feed(Detokenizer(smollm2_tokenizer, []), token_ids)
    assert texts[-1] == smollm2_tokenizer.decode(token_ids, skip_special_tokens=True)


class SentencePieceTokenizer:
    """A slow tokenizer, without tokenizers.Tokenizer inside: "▁" is a space, and a text loses its leading one."""

    PIECES = ("▁", "▁the", "the", "▁a", "b", "▁▁", "▁日本", "!")

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(self.PIECES[token_id] for token_id in token_ids).replace("▁", " ").removeprefix(" ")


@given(prompt=st.lists(st.integers(0, 7), max_size=9), answer=st.lists(st.integers(0, 7), min_size=1, max_size=12))
def test_text_of_a_slow_sentencepiece_tokenizer_only_grows(prompt: list[int], answer: list[int]) -> None:
    tokenizer = SentencePieceTokenizer()
    texts, _ = feed(Detokenizer(tokenizer, prompt), answer)
    together = tokenizer.decode([*prompt, *answer])
    assert together == tokenizer.decode(prompt) + texts[-1]
    assert all(texts[-1].startswith(shown) for shown in texts)


class CountingTokenizer:
    """Counts the tokens that another tokenizer decodes."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.num_decoded = tokenizer, 0

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        self.num_decoded += len(token_ids)
        return self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)


class ByteFallbackTokenizer:
    """Pieces and bytes, as SentencePiece has them: bytes in a row are text only if all of them are. Token 300 is empty,
    301 special, 302 a word."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        text, run = "", b""
        for token_id in [*(token_id for token_id in token_ids if token_id != 301), 300]:
            if token_id < 256:
                run += bytes([token_id])
                continue
            try:
                text += run.decode()
            except UnicodeDecodeError:
                text += "\N{REPLACEMENT CHARACTER}" * len(run)
            text, run = text + ("word" if token_id == 302 else ""), b""
        return text


PATTERNS: dict[str, list[int]] = {
    "special": [256],
    "half a character": [0xE6],
    "stray bytes": [0xFF, 0x80],
    "bytes and special tokens": [0xFF, 256],
    "a letter among special tokens": [256, 256, 256, 65],
    "bytes, then a letter": [*[0x80] * 50, 66],
}


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(
    "prompt", [[], [65], [256, 65, 0xE6]], ids=["no prompt", "a prompt", "half a character before"]
)
def test_time_is_linear_where_tokens_add_no_text(pattern: str, prompt: list[int]) -> None:
    token_ids = (PATTERNS[pattern] * 600)[:600]
    tokenizer = CountingTokenizer(BYTES)
    texts, _ = feed(Detokenizer(tokenizer, prompt), token_ids)
    assert prompt[-1:] == [0xE6] or texts[-1] == BYTES.decode(token_ids)
    assert tokenizer.num_decoded < 40 * len(token_ids)


@given(token_ids=st.lists(st.sampled_from([256, 65, 0xE6, 0x97, 0xA5, 0xFF, 0xF0, 0x9F]), max_size=60))
def test_any_bytes_and_special_tokens_are_decoded_as_at_once(token_ids: list[int]) -> None:
    texts, _ = feed(Detokenizer(BYTES, [65]), token_ids)
    assert texts[-1] == BYTES.decode(token_ids)


@pytest.mark.parametrize("pattern", [[301], [300], [0xFF], [0xFF, 301], [0xE6, 302], [0xFF, 302, 300]])
def test_bytes_in_a_row_are_decoded_in_linear_time(pattern: list[int]) -> None:
    fallback = ByteFallbackTokenizer()
    tokenizer, token_ids = CountingTokenizer(fallback), pattern * 300
    texts, _ = feed(Detokenizer(tokenizer, [302]), token_ids)
    assert texts[-1] == fallback.decode(token_ids)
    assert tokenizer.num_decoded < 40 * len(token_ids)


@pytest.mark.parametrize(
    ("after", "text"),
    [([0xF0, 0x9F], "\ufffd\ufffd"), ([0xFF, 302], "\ufffdword"), ([*"🙂".encode(), 0xFF, 302], "🙂\ufffdword")],
    ids=["half a character at the end", "a stray byte", "a stray byte after two characters"],
)
def test_bytes_of_no_character_leave_characters_that_were_shown(after: list[int], text: str) -> None:
    texts, _ = feed(Detokenizer(ByteFallbackTokenizer(), [302]), [*"🙂".encode(), *after])
    assert texts[-1] == f"🙂{text}"
    assert all(texts[-1].startswith(shown) for shown in texts)


class TidyTokenizer(ByteTokenizer):
    """Takes back the space before a comma, unless it is told not to."""

    clean_up_tokenization_spaces = True

    def decode(
        self,
        token_ids: Sequence[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> str:
        text = super().decode(token_ids)
        return text if clean_up_tokenization_spaces is False else text.replace(" ,", ",")


def test_spaces_that_were_shown_are_not_taken_back() -> None:
    texts, found = feed(Detokenizer(TidyTokenizer(), [65], [" , c"]), TidyTokenizer().encode("a , b"))
    assert texts[-1] == "a , b" and found is None


class PartialTokenizer(ByteTokenizer):
    """Has no token for DEL and raises, as tokenizers in Python do for a row of the logits that is padding."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        if 127 in token_ids:
            raise IndexError("piece id is out of range")
        return super().decode(token_ids)


def test_a_token_that_cannot_be_decoded_is_left_out() -> None:
    detokenizer = Detokenizer(PartialTokenizer(), [65], ["bcd"])
    assert detokenizer.append(ord("b")) is None
    with pytest.raises(IndexError):
        detokenizer.append(127)
    assert detokenizer.flush() is None and detokenizer.text == "b"


@given(special=st.integers(0, 2), data=st.data())
def test_special_tokens_of_smollm2_may_stand_anywhere(
    smollm2_tokenizer: Any, special: int, data: st.DataObject
) -> None:
    token_ids = data.draw(st.lists(st.one_of(st.just(special), st.integers(0, 800)), min_size=1, max_size=30))
    texts, _ = feed(Detokenizer(smollm2_tokenizer, [100]), token_ids)
    together = smollm2_tokenizer.decode([100, *token_ids], skip_special_tokens=True)
    assert together == smollm2_tokenizer.decode([100]) + texts[-1]


class MarkTokenizer(ByteTokenizer):
    """Tokens 256 and 257 are special: a mark that a reader may want, and an end."""

    all_special_ids = (256, 257)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        special = {256: b"" if skip_special_tokens else b"[CALL]", 257: b"" if skip_special_tokens else b"[END]"}
        return b"".join(special.get(token_id, bytes([token_id % 256])) for token_id in token_ids).decode(
            errors="replace"
        )


def test_special_tokens_that_are_kept_are_text_and_the_others_are_not() -> None:
    token_ids = [*b"a", 257, 256, *"é".encode(), 257]
    texts, _ = feed(Detokenizer(MarkTokenizer(), [257, 65], kept_special_token_ids=[256]), token_ids)
    assert texts[-1] == "a[CALL]é"
    texts, _ = feed(Detokenizer(MarkTokenizer(), [257, 65]), token_ids)
    assert texts[-1] == "aé"
    texts, _ = feed(
        Detokenizer(MarkTokenizer(), [], skip_special_tokens=False, kept_special_token_ids=[256]), token_ids
    )
    assert texts[-1] == "a[END][CALL]é[END]"
