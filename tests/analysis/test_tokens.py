"""Token counts and block numbers of texts, with and without a tokenizer."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from trunkattn.analysis.formats.base import Chat, Entry
from trunkattn.analysis.reading.log import read_log
from trunkattn.analysis.reading.tokens import ByteEstimate, chained, measured_estimate, read_tokenizer

TEMPLATE = (
    "{% for tool in tools or [] %}<tool>{{ tool.function.name }}{% endfor %}"
    "{% for message in messages %}<{{ message.role }}> {{ message.content }} {% endfor %}<assistant>"
)
WORDS = ["[unk]", "<", ">", "system", "user", "assistant", "tool", "tide", "be", "brief", "hello", "there", "[image]"]


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that makes a token of each word and of each sign."""
    folder = tmp_path_factory.mktemp("tokenizer")
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[unk]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE, "unk_token": "[unk]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def write(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


@given(st.lists(st.integers(0, 2), min_size=1, max_size=12), st.lists(st.integers(0, 2), min_size=1, max_size=12))
def test_blocks_are_equal_up_to_the_first_difference(one: list[int], other: list[int]) -> None:
    blocks = [chained(np.array(units, dtype=np.int64), 4) for units in (one, other)]
    for block in range(min(map(len, blocks))):
        equal = one[: 4 * block + 4] == other[: 4 * block + 4]
        assert (blocks[0][block] == blocks[1][block]) == equal
    assert len(blocks[0]) == -(-len(one) // 4)


def test_block_numbers_are_the_same_in_every_run() -> None:
    assert chained(np.array([1, 2, 3], dtype=np.int64), 2).tolist() == [-3243813654562478602, 1046728250438913399]


def test_an_estimate_counts_bytes() -> None:
    estimate = ByteEstimate()
    (encoded,) = estimate.encode(["x" * 130])
    assert (encoded.num_tokens, len(encoded.blocks), encoded.block_size) == (33, 3, 16)
    assert estimate.count("äöü") == 2
    shorter, longer = estimate.encode(["x" * 64 + "y", "x" * 64 + "z" * 100])
    assert shorter.blocks[0] == longer.blocks[0]
    assert shorter.blocks[1] != longer.blocks[1]
    assert "4 bytes per token" in estimate.tokens_from


@pytest.mark.parametrize("rate", [0.5, 1.0, 2.5, 3.5, 4.0, 7.5])
@pytest.mark.parametrize("length", [1, 7, 8, 63, 64, 65, 1000])
def test_an_estimate_has_a_block_for_each_sixteen_tokens(rate: float, length: int) -> None:
    (encoded,) = ByteEstimate(rate).encode(["x" * length])
    assert encoded.num_tokens == -int(-length // rate)
    assert len(encoded.blocks) == -(-encoded.num_tokens // 16)


def test_the_log_s_own_counts_give_the_bytes_of_a_token(tmp_path: Path) -> None:
    entries = [Entry(1, "x" * 300, num_prompt_tokens=100), Entry(2, "y" * 1000)]
    assert measured_estimate(entries) == ByteEstimate(3.0, is_measured=True)
    assert measured_estimate(entries[1:]) == ByteEstimate()
    log = read_log(write(tmp_path / "log.jsonl", {"prompt": "x" * 300, "prompt_tokens": 100}, {"prompt": "y" * 900}))
    assert [request.num_prompt_tokens for request in log.requests] == [100, 300]
    assert log.tokens_from == "an estimate of 3 bytes per token, which the log's own counts give"


def test_messages_are_rendered_with_roles_and_tools() -> None:
    parts = [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {"url": "data:..."}}]
    chat = Chat([{"role": "system", "content": "be brief"}, {"role": "user", "content": parts}], [{"name": "tide"}])
    assert ByteEstimate().render(chat) == (
        '<|tools|>\n[{"name": "tide"}]\n<|system|>\nbe brief\n<|user|>\nlook\n'
        "[image_url cfeeicnhnkebkojh]\n<|assistant|>\n"
    )
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    assert ByteEstimate().render(Chat([call])) == '<|assistant|>\n[{"id": "1"}]\n<|assistant|>\n'


def test_a_tokenizer_and_its_template_count(tokenizer_folder: Path, tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "tide"}}
    system = {"role": "system", "content": "be brief"}
    rows = [
        {"messages": [system, {"role": "user", "content": "hello"}], "tools": [tool], "response": "hello there"},
        {"prompt": "hello there", "output_tokens": 4, "prompt_tokens": 9},
        {"prompt": [3, 4, 5]},
    ]
    log = read_log(write(tmp_path / "log.jsonl", *rows), tokenizer=tokenizer_folder)
    assert log.texts is not None
    assert log.texts[0] == "<tool>tide<system> be brief <user> hello <assistant>"
    assert [request.num_prompt_tokens for request in log.requests] == [16, 2, 3]
    assert [request.num_output_tokens for request in log.requests] == [2, 4, None]
    assert log.texts[2] == "system user assistant"
    assert log.tokens_from == f"the tokenizer of {tokenizer_folder.name}"
    told = (
        f"The log counts 9 prompt tokens, and the tokenizer of {tokenizer_folder.name} counts 2; the latter are used."
    )
    assert told in log.assumptions


def test_token_ids_stay_as_they_are_beside_a_tokenizer(tokenizer_folder: Path, tmp_path: Path) -> None:
    """The tokenizer would write [unk] as the three tokens [, unk and ], and has no word for the last prompts."""
    rows = [{"prompt": ids} for ids in ([10, 11, 12], [0, 0], [10, 999], [2**64 - 1])]
    log = read_log(write(tmp_path / "log.jsonl", *rows), tokenizer=tokenizer_folder)
    assert [request.num_prompt_tokens for request in log.requests] == [3, 2, 2, 1]
    assert log.requests[0].blocks.tolist() == chained(np.array([10, 11, 12]), 16).tolist()
    assert log.texts is not None
    assert list(log.texts) == ["hello there [image]", "[unk] [unk]", "", ""]


def test_half_a_surrogate_pair_is_a_character_that_no_tokenizer_knows(tokenizer_folder: Path, tmp_path: Path) -> None:
    rows = [
        {"prompt": "hello \ud83d there", "response": "hello \udc00"},
        {"messages": [{"role": "user", "content": "\ud83d"}], "response": "hello"},
    ]
    log = read_log(write(tmp_path / "log.jsonl", *rows), tokenizer=tokenizer_folder)
    assert [(request.num_prompt_tokens, request.num_output_tokens) for request in log.requests] == [(3, 2), (7, 1)]


def test_token_ids_without_a_tokenizer_are_exact(tmp_path: Path) -> None:
    log = read_log(write(tmp_path / "log.jsonl", {"prompt": list(range(40))}, {"prompt": [*range(33), 7]}))
    assert [request.num_prompt_tokens for request in log.requests] == [40, 34]
    one, other = (request.blocks.tolist() for request in log.requests)
    assert one[:2] == other[:2]
    assert one[2] != other[2]
    assert log.texts is None


@pytest.mark.parametrize(
    ("error", "reason"),
    [("'only users'", ": 'only users'"), ("'not ' + messages[0].content", ", with a TemplateError")],
)
def test_a_template_that_refuses_leaves_the_line_out(
    tokenizer_folder: Path, tmp_path: Path, error: str, reason: str
) -> None:
    folder = tmp_path / "strict"
    folder.mkdir()
    for file in tokenizer_folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    template = f"{{{{ raise_exception({error}) if messages[0].role != 'user' }}}}" + TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    rows = [{"messages": [{"role": role, "content": "hello"}]} for role in ("user", "system")]
    log = read_log(write(tmp_path / "log.jsonl", *rows), tokenizer=folder)
    assert (len(log.requests), log.num_skipped, log.skipped[0].line) == (1, 1, 2)
    assert log.skipped[0].reason == f"messages: the chat template refuses them{reason}"


def test_a_tokenizer_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer='.*none': there is no such folder; expected one with a tokenizer"):
        read_tokenizer(tmp_path / "none")
    with pytest.raises(ValueError, match=r"tokenizer='.*': the folder has no tokenizer; expected a tokenizer\.json"):
        read_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"^tokenizer='.*': transformers cannot read its tokenizer"):
        read_tokenizer(tmp_path)
