"""What spoils sharing: planted fields are found, each kind of them, and clean logs have none."""

import json
import random
import string
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from uuid import UUID

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trunkattn.analysis.reading.log import read_log
from trunkattn.analysis.reading.tokens import ByteEstimate
from trunkattn.analysis.records import Log, LoggedRequest
from trunkattn.analysis.spoilers.alignment import fields_of, spans_in
from trunkattn.analysis.spoilers.search import find_spoilers, rewritten
from trunkattn.analysis.spoilers.varying import Example, kind_of
from trunkattn.analysis.texts import Texts

from ..attention.cases import fraction

Words = Callable[[int], str]
SEEDS = st.integers(0, 1 << 32)
NAMES = ("Alice", "Bob Smith", "Carla", "Deng Wei", "Eve", "Farid", "Gina Rossi", "Hélène")


def words_of(rng: random.Random) -> Words:
    """Sentences without sense."""
    vocabulary = ["".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 9))) for _ in range(2000)]
    return lambda count: " ".join(rng.choices(vocabulary, k=count))


def log_of(texts: Sequence[str]) -> Log:
    """A log of prompts, a second apart."""
    encode = ByteEstimate().encode
    requests = [
        LoggedRequest(line, float(line), encoded.num_tokens, 5, encoded.blocks, encoded.block_size)
        for line, encoded in enumerate(encode(texts), start=1)
    ]
    return Log("log", "test", requests, len(texts), texts=Texts(texts), encode=encode)


def hits(log: Log) -> int:
    """Tokens of full blocks that a cache without end has when each prompt comes."""
    seen: set[int] = set()
    found = 0
    for request in log.requests:
        full = request.blocks.tolist()[: request.num_prompt_tokens // request.block_size]
        found += request.block_size * next((at for at, block in enumerate(full) if block not in seen), len(full))
        seen.update(full)
    return found


def timestamp(rng: random.Random) -> Callable[[], str]:
    form = rng.choice(["%Y-%m-%dT%H:%M:%SZ", "%Y-%m-%d %H:%M:%S", "%A, %B %d, %Y, %H:%M", "%d.%m.%Y %H:%M:%S"])
    return lambda: (datetime(2026, 1, 1) + timedelta(minutes=rng.randint(0, 500_000))).strftime(form)


def date(rng: random.Random) -> Callable[[], str]:
    form = rng.choice(["%Y-%m-%d", "%B %d, %Y", "%d %B %Y", "%d.%m.%Y", "%m/%d/%Y"])
    return lambda: (datetime(2026, 1, 1) + timedelta(days=rng.randint(0, 400))).strftime(form)


def request_id(rng: random.Random) -> Callable[[], str]:
    kinds = (
        lambda: str(UUID(int=rng.getrandbits(128))),
        lambda: f"req_{rng.getrandbits(64):016x}",
        lambda: f"{rng.getrandbits(128):032x}",
    )
    return rng.choice(kinds)


def version(rng: random.Random) -> Callable[[], str]:
    return lambda: f"v{rng.randint(1, 3)}.{rng.randint(0, 9)}.{rng.randint(0, 9)}"


# Kind, label in front of the field, and what makes its texts.
PLANTED = {
    "timestamp": ("Current time: ", timestamp),
    "date": ("Today is ", date),
    "request id": ("Request id: ", request_id),
    "version": ("You are the assistant ", version),
    "user name": ("The user is ", lambda rng: lambda: rng.choice(NAMES)),
    "text": ("Mood of the day - ", lambda rng: lambda: " ".join(rng.sample(("warm", "dry", "calm", "grey", "wet"), 3))),
}


@pytest.mark.property
@pytest.mark.parametrize("kind", PLANTED)
@settings(max_examples=fraction(6))
@given(seed=SEEDS)
def test_a_planted_field_is_found_and_moved(kind: str, seed: int) -> None:
    rng = random.Random(seed)
    words = words_of(rng)
    label, maker = PLANTED[kind]
    make = maker(rng)
    before, behind = words(rng.randint(0, 60)), words(rng.randint(60, 400))
    count = rng.randint(24, 60)
    parts = [make() for _ in range(count)]
    questions = [words(rng.randint(3, 60)) for _ in range(count)]
    texts = [f"{before}\n{label}{part}.\n{behind}\n{question}" for part, question in zip(parts, questions, strict=True)]
    log = log_of(texts)
    (finding,) = find_spoilers(log)
    spoiler = finding.spoiler
    assert spoiler.kind in (kind, "order of parts" if kind == "text" else kind)
    assert spoiler.num_requests == count
    start = len(f"{before}\n{label}".encode())
    assert start / 4 - 12 <= spoiler.token <= start / 4 + 12
    assert abs(spoiler.shared_after - len(behind) / 4) <= 8
    assert 0 < spoiler.varying_tokens <= 12
    assert 0 < len(spoiler.examples) == len(spoiler.lines) <= 3
    better = rewritten(log, finding)
    if spoiler.kind == kind:
        assert better.texts is not None
        assert [sorted(text) for text in better.texts] == [sorted(text) for text in texts]
    assert hits(better) > hits(log)
    assert hits(better) >= (count - 1) * (len(f"{before}{behind}") // 4 - 48)
    assert find_spoilers(better) == []


def shuffled_tools(rng: random.Random, words: Words) -> Callable[[], str]:
    tools = [
        {"type": "function", "function": {"name": f"get_{name}", "description": words(rng.randint(5, 60))}}
        for name in ("weather", "time", "stock", "news", "tide")
    ]
    return lambda: json.dumps(rng.sample(tools, len(tools)))


def shuffled_keys(rng: random.Random, words: Words) -> Callable[[], str]:
    pairs = [(key, words(rng.randint(1, 12))) for key in ("alpha", "beta", "gamma", "delta")]
    return lambda: json.dumps(dict(rng.sample(pairs, len(pairs))))


def shuffled_documents(rng: random.Random, words: Words) -> Callable[[], str]:
    documents = [f"[{number}] {words(rng.randint(10, 200))}\n" for number in range(4)]
    return lambda: "".join(rng.sample(documents, len(documents)))


SHUFFLED = {
    "order of tools": shuffled_tools,
    "order of keys": shuffled_keys,
    "order of parts": shuffled_documents,
}


@pytest.mark.property
@pytest.mark.parametrize("kind", SHUFFLED)
@settings(max_examples=fraction(6))
@given(seed=SEEDS)
def test_an_order_that_varies_is_found_and_fixed(kind: str, seed: int) -> None:
    rng = random.Random(seed)
    words = words_of(rng)
    make = SHUFFLED[kind](rng, words)
    before, behind = words(rng.randint(0, 60)), words(rng.randint(80, 300))
    parts = [make() for _ in range(rng.randint(24, 40))]
    log = log_of([f"{before}\n{part}\n{behind}\n{words(rng.randint(3, 60))}" for part in parts])
    found = find_spoilers(log)
    assert found[0].spoiler.kind == kind
    assert found[0].spoiler.num_requests == len(parts)
    assert "order" in found[0].spoiler.advice
    assert hits(rewritten(log, found[0])) >= (len(parts) - 1) * (len(f"{before}{parts[0]}{behind}") // 4 - 48)


@pytest.mark.property
@settings(max_examples=fraction(6))
@given(seed=SEEDS)
def test_two_fields_of_the_same_prompts_are_told_one_after_the_other(seed: int) -> None:
    rng = random.Random(seed)
    words = words_of(rng)
    times, ids = timestamp(rng), request_id(rng)
    before, between, behind = words(rng.randint(0, 60)), words(rng.randint(60, 200)), words(rng.randint(60, 200))
    texts = [
        f"{before}\nCurrent time: {times()}.\n{between}\nRequest id: {ids()}.\n{behind}\n{words(20)}" for _ in range(40)
    ]
    log = log_of(texts)
    found = sorted(find_spoilers(log), key=lambda it: it.spoiler.token)
    assert [it.spoiler.kind for it in found] == ["timestamp", "request id"]
    gains = [hits(rewritten(log, it)) for it in found]
    assert hits(log) < gains[0] < gains[1]
    assert gains[1] >= 39 * (len(f"{before}{between}{behind}") // 4 - 48)


def test_a_moved_field_parts_neither_turns_nor_documents() -> None:
    rng = random.Random(3)
    words, make = words_of(rng), timestamp(rng)
    system, texts, told = words(100), [], 0
    for _ in range(10):
        said = words(60)  # a document, or the first turn of a conversation
        for turn in range(4):
            texts.append(f"<|system|>\nNow: {make()}.\n{system}\n<|user|>\n{said}")
            told += len(said) if turn else 0
            said += f"\n<|assistant|>\n{words(30)}\n<|user|>\n{words(30)}"
    log = log_of(texts)
    (finding,) = find_spoilers(log)
    assert finding.spoiler.kind == "timestamp"
    assert finding.spoiler.where.startswith("system message")
    assert finding.spoiler.advice.endswith("best to the end of the prompt.")
    previous_turns = 30 * len(system) + 10 * sum(len(text) for text in texts[:3]) / 40
    assert hits(rewritten(log, finding)) > hits(log) + previous_turns / 4


def test_a_user_s_field_stays_in_its_message() -> None:
    rng = random.Random(4)
    words, make = words_of(rng), timestamp(rng)
    rules, texts = words(100), []
    for _ in range(30):
        texts.append(f"<|user|>\nNow: {make()}.\n{rules}\n<|assistant|>\n{words(30)}\n<|user|>\n{words(30)}")
    log = log_of(texts)
    (finding,) = find_spoilers(log)
    assert finding.spoiler.advice.endswith("within its message.")
    better = rewritten(log, finding)
    assert better.texts is not None
    before, behind = texts[0].split("\n<|assistant|>\n")
    moved_before, moved_behind = better.texts[0].split("<|assistant|>\n")
    assert behind == moved_behind
    assert sorted(before + "\n") == sorted(moved_before)


@pytest.mark.parametrize(
    ("head", "where"),
    [
        ("<|im_start|>system\n", "system message"),
        ("<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n", "system message"),
        ("<|start|>developer<|message|>", "developer message"),
        ("<|system|>\nrules\n<|user|>\n", "user message"),
        ("<start_of_turn>user\n", "user message"),
        ("<\uff5cUser\uff5c>", "user message"),
        ("<s>[INST] ", "user message"),
        ("<|tools|>\n", "tools"),
        ("", "prompt"),
    ],
)
def test_the_message_with_the_field_is_named(head: str, where: str) -> None:
    words = words_of(random.Random(5))
    rules = words(100)
    (finding,) = find_spoilers(log_of([f"{head}Request 10{number}.\n{rules}\n{words(9)}" for number in range(20)]))
    assert finding.spoiler.kind == "request id"
    assert finding.spoiler.where.startswith(f"{where}, token ")


@pytest.mark.property
@settings(max_examples=fraction(6))
@given(seed=SEEDS)
def test_applications_of_one_log_are_told_apart(seed: int) -> None:
    rng = random.Random(seed)
    words = words_of(rng)
    times, count = timestamp(rng), rng.choice([2, 12])
    spoiled = [words(rng.randint(80, 200)) for _ in range(count)]
    clean = words(rng.randint(80, 200))
    texts = [f"Current time: {times()}.\n{spoiled[place]}\n{words(20)}" for place in range(count) for _ in range(20)]
    texts += [f"{clean}\n{words(20)}" for _ in range(30)]
    order = rng.sample(range(len(texts)), len(texts))
    found = find_spoilers(log_of([texts[place] for place in order]))
    assert [(it.spoiler.kind, it.spoiler.num_requests) for it in found] == [("timestamp", 20)] * count
    for it in found:
        assert len({order[line - 1] // 20 for line in it.spoiler.lines}) == 1


def questions(rng: random.Random, words: Words) -> list[str]:
    """One system prompt, and questions of any length."""
    system = words(rng.randint(0, 300))
    return [f"{system}\n{words(rng.randint(1, 200))}\nassistant:" for _ in range(40)]


def documents(rng: random.Random, words: Words) -> list[str]:
    """Documents behind one system prompt, each with several questions."""
    system, found = words(rng.randint(0, 100)), []
    for _ in range(rng.randint(2, 8)):
        document = words(rng.randint(50, 400))
        found += [f"{system}\n{document}\n{words(rng.randint(1, 40))}" for _ in range(8)]
    return found


def conversations(rng: random.Random, words: Words) -> list[str]:
    """Turns of conversations, each with all that was said before."""
    system, found = words(rng.randint(10, 200)), []
    for _ in range(10):
        said = f"<|system|>\n{system}\n"
        for _ in range(rng.randint(1, 5)):
            said += f"<|user|>\n{words(rng.randint(1, 80))}\n"
            found.append(said + "<|assistant|>\n")
            said += f"<|assistant|>\n{words(rng.randint(1, 80))}\n"
    return found


def canned(rng: random.Random, words: Words) -> list[str]:
    """Conversations that all begin with another greeting and the same long answer: messages do not change places."""
    system, answer = words(rng.randint(10, 100)), words(100)
    head = f"<|system|>\n{system}\n<|user|>\n"
    return [f"{head}{words(3)}\n<|assistant|>\n{answer}\n<|user|>\n{words(20)}" for _ in range(40)]


def retrieved(rng: random.Random, words: Words) -> list[str]:
    """A few short pieces of documents behind one system prompt: equal ones often stand behind another piece."""
    system, pieces = words(rng.randint(10, 100)), [words(rng.randint(40, 90)) for _ in range(40)]
    return ["\n\n".join([system, *rng.sample(pieces, 3), words(9)]) for _ in range(100)]


def unrelated(rng: random.Random, words: Words) -> list[str]:
    """Prompts that have nothing in common."""
    return [words(rng.randint(1, 300)) for _ in range(40)]


def repeated(rng: random.Random, words: Words) -> list[str]:
    """A few prompts again and again."""
    prompts = [words(rng.randint(1, 300)) for _ in range(5)]
    return [rng.choice(prompts) for _ in range(60)]


@pytest.mark.property
@pytest.mark.parametrize("make", [questions, documents, conversations, canned, retrieved, unrelated, repeated])
@settings(max_examples=fraction(6))
@given(seed=SEEDS)
def test_a_clean_log_has_none(make: Callable[[random.Random, Words], list[str]], seed: int) -> None:
    rng = random.Random(seed)
    texts = make(rng, words_of(rng))
    log = log_of(rng.sample(texts, len(texts)))
    assert [it.spoiler for it in find_spoilers(log)] == []


@pytest.mark.parametrize("phrase", ["now {}. ", "It is {} by the clock on the wall of the shop. "])
def test_prompts_that_lack_the_field_are_of_the_group(phrase: str) -> None:
    rng = random.Random(0)
    words, make = words_of(rng), timestamp(rng)
    before, behind = words(40), words(200)
    texts = [f"{before} {phrase.format(make()) if number % 2 else ''}{behind} {words(10)}" for number in range(40)]
    (finding,) = find_spoilers(log_of(texts))
    assert (finding.spoiler.kind, finding.spoiler.num_requests) == ("timestamp", 40)


@pytest.mark.parametrize("seed", range(3))
def test_prompts_with_real_documents_have_none(seed: int) -> None:
    rng = random.Random(seed)
    pages = [page.read_text() for page in sorted((Path(__file__).parents[2] / "docs" / "guide").glob("*.md"))]
    pieces = [page[start : start + 1500] for page in pages for start in range(0, len(page) - 1500, 1500)]
    system, words = pages[0][:2000], words_of(rng)
    retrieved = ["\n---\n".join([system, *rng.sample(pieces, 3), words(9)]) for _ in range(150)]
    whole = ["\n".join([system, rng.choice(pages), words(9)]) for _ in range(150)]
    code = [page[: rng.randint(300, len(page))] for page in rng.choices(pages, k=150)]
    for texts in (retrieved, whole, code):
        assert find_spoilers(log_of(texts)) == []


def test_what_is_equal_by_chance_belongs_to_the_field() -> None:
    words = words_of(random.Random(0))
    behind = words(150)
    for times in (["08:25:15", "11:05:15"], ["08:25:15", "11:25:15", "12:25:15"]):
        texts = [f"It is {time}.\n{behind}\n{words(9)}" for time in times]
        (field,) = fields_of(texts)
        assert texts[0][field.start : field.end] == times[0]
        assert field.shared.startswith(f".\n{behind}")
        assert len(spans_in(f"It is 23:59:01.\n{behind}", texts[0], [field])) == 1


def test_few_requests_are_not_worth_a_word() -> None:
    words = words_of(random.Random(0))
    before, behind = words(40), words(200)
    many = [f"{before} version 1 {behind} {words(10)}" for _ in range(5000)]
    few = [f"{before} version 2 {behind} {words(10)}" for _ in range(5)]
    assert find_spoilers(log_of(many + few[:4])) == []
    assert len(find_spoilers(log_of(many + few))) == 1


def test_what_is_told_has_no_text_of_the_log(tmp_path: Path) -> None:
    words = words_of(random.Random(1))
    secret, behind = words(30), words(200)
    rows = [
        {
            "messages": [
                {"role": "system", "content": f"{secret} id {number:08x}{behind}"},
                {"role": "user", "content": "?"},
            ]
        }
        for number in range(20)
    ]
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    (finding,) = find_spoilers(read_log(path))
    assert finding.spoiler.where.startswith("system message, token ")
    told = finding.spoiler.where + finding.spoiler.advice + finding.spoiler.kind + repr(finding)
    assert not set(secret.split()) & set(told.split())
    assert finding.spoiler.gain_tpot is None


@pytest.mark.property
@settings(max_examples=fraction(2))
@given(seed=SEEDS)
def test_a_block_that_varies_is_found_where_hashes_are_of_contents(
    seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rng = random.Random(seed)
    before, behind = list(range(1, rng.randint(1, 6))), list(range(100, 100 + rng.randint(2, 6)))
    rows = []
    for number in range(24):
        ids = [*before, 1000 + number, *behind, *range(5000 + 100 * number, 5000 + 100 * number + rng.randint(0, 4))]
        num_tokens = 512 * len(ids) - rng.choice([0, 100])
        rows.append({"timestamp": number, "input_length": num_tokens, "output_length": 1, "hash_ids": ids})
    path = tmp_path_factory.mktemp("logs") / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    log = read_log(path)
    (finding,) = find_spoilers(log)
    spoiler = finding.spoiler
    assert (spoiler.kind, spoiler.num_requests, spoiler.token) == ("block", 24, 512 * len(before))
    assert (spoiler.varying_tokens, spoiler.shared_after) == (512, 512 * len(behind))
    better = rewritten(log, finding)
    assert hits(better) >= 23 * 512 * (len(before) + len(behind) - 1) > hits(log) + 512
    assert [len(request.blocks) for request in better.requests] == [len(request.blocks) for request in log.requests]
    of_first = rewritten(log, finding, max_requests=1).requests
    assert [(each.key, each.blocks.tolist()) for each in of_first[1:]] == [
        (each.key, each.blocks.tolist()) for each in log.requests[1:]
    ]


def test_chained_hashes_tell_no_spoiler_and_the_log_says_so(tmp_path: Path) -> None:
    rows = [
        {"timestamp": number, "input_length": 1536, "output_length": 1, "hash_ids": [1, 10 + number, 50 + number]}
        for number in range(30)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    log = read_log(path)
    assert find_spoilers(log) == []
    assert log.assumptions == [
        "The log's hashes are of all that precedes a block, so they tell no field that spoils sharing."
    ]


def test_a_log_without_texts_has_none() -> None:
    request = LoggedRequest(1, None, 16, None, np.array([1]), 16)
    assert find_spoilers(Log("log", "test", [request] * 20, 20)) == []


def test_addresses_of_one_domain_are_user_names() -> None:
    texts = [(f"Write to {name}@example.com today.", 9, 9 + len(name)) for name in ("al16", "bo3", "cy5")]
    assert kind_of([Example(*text) for text in texts]) == ("user name", 0)
