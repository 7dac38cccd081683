"""The real SmolLM2-135M: equality with transformers, text, chat, stop strings; from a folder and from GGUF."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from trunkattn.engine import LLM, RequestOutput, SamplingParams

pytestmark = pytest.mark.slow

NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
TRUNK = (
    "You are the librarian of a small town. People come to you with questions about books, about the history of the "
    "town, and about their families. You answer in one short sentence, politely, and you never invent a book. "
) * 4
QUESTIONS = ("Which book should I read first?", "Who built the old mill?", "What is 2 + 2?")

AssertGreedy = Callable[[Any, Sequence[RequestOutput], int], None]


@pytest.fixture(scope="module")
def llm(smollm2: Any) -> LLM:
    return LLM(smollm2.path, num_pages=200, max_num_batched_tokens=128, max_num_seqs=16)


def test_a_shared_prefix_may_be_computed_in_chunks(
    llm: LLM, smollm2: Any, smollm2_tokenizer: Any, assert_greedy: AssertGreedy
) -> None:
    prompts = [TRUNK + question for question in QUESTIONS] + ["The capital of France is"]
    outputs = llm.generate(prompts, GREEDY)
    assert_greedy(smollm2, outputs, NUM_TOKENS)
    length = len(outputs[0].prompt_token_ids)
    assert length > 128, "the prefix takes more than one chunk"
    assert [output.num_cached_tokens > 128 for output in outputs] == [False, True, True, False]
    for output in outputs:
        answer = output.outputs[0]
        assert answer.text == smollm2_tokenizer.decode(answer.token_ids, skip_special_tokens=True)
    assert " Paris" in outputs[3].outputs[0].text


def test_chat_ends_by_itself(llm: LLM, smollm2: Any, smollm2_tokenizer: Any, assert_greedy: AssertGreedy) -> None:
    conversation = [{"role": "user", "content": "Reply with one word: what colour is the sky?"}]
    (output,) = llm.chat(conversation, SamplingParams(temperature=0, max_tokens=30))
    assert_greedy(smollm2, [output], 30)
    assert output.outputs[0].finish_reason == "stop" and "<|im_end|>" not in output.outputs[0].text
    assert smollm2_tokenizer.decode(output.prompt_token_ids).endswith("<|im_start|>assistant\n")
    both = llm.chat([conversation, conversation], SamplingParams(temperature=0, max_tokens=30))
    assert [one.outputs[0].text for one in both] == [output.outputs[0].text] * 2


BAD_CHATS: list[tuple[Any, str]] = [
    ([], r"messages=\[\]: expected at least one message"),
    ([[]], r"messages\[0\]=\[\]: expected at least one message"),
    ("hello", "messages='hello': expected a list of messages"),
    ({"role": "user", "content": "x"}, "messages={.*: expected a list of messages"),
    (["hi"], r"messages\[0\]='hi': expected a list of messages"),
    ([[{"role": "user", "content": "x"}, 5]], r"messages\[0\]\[1\]=5: expected a mapping"),
    ([{"foo": "bar"}], r"messages\[0\]={'foo': 'bar'}: expected a role"),
    ([{"role": "user", "content": 5}], r"messages\[0\]\.content=5: expected a text or a list of parts"),
]


@pytest.mark.parametrize(("messages", "message"), BAD_CHATS)
def test_bad_conversations_are_refused(llm: LLM, messages: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        llm.chat(messages)
    assert not llm.engine.has_unfinished


def test_stop_strings_and_empty_prompts(llm: LLM) -> None:
    prompt = "One, two, three, four,"
    free = llm.generate(prompt, GREEDY)[0].outputs[0]
    stopped = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=NUM_TOKENS, stop=[" six", "zzz"]))[
        0
    ].outputs[0]
    assert " six" in free.text
    assert stopped.text == free.text[: free.text.index(" six")]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", " six")
    with pytest.raises(ValueError, match=r"prompts\[0\]=''"):
        llm.generate("")


def test_streamed_text_only_grows(llm: LLM) -> None:
    texts = [output.outputs[0].text for _, output in llm.stream("Say it with emojis: 🙂", GREEDY)]
    assert all(after.startswith(before) for before, after in pairwise(texts))
    assert texts[-1] == llm.generate("Say it with emojis: 🙂", GREEDY)[0].outputs[0].text


def test_gguf_gives_the_same_answers(smollm2_gguf: Path, smollm2: Any, assert_greedy: AssertGreedy) -> None:
    llm = LLM(smollm2_gguf, num_pages=50, policy="pat")
    outputs = llm.generate(["The capital of France is", "One, two, three, four,"], GREEDY)
    assert_greedy(smollm2, outputs, NUM_TOKENS)
