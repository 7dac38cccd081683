"""Answers of a given form, from a random model with SmolLM2's tokens, and once from SmolLM2."""

import json
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import llguidance
import pytest

from trunkattn.engine import LLM, SamplingParams, StructuredOutputsParams
from trunkattn.engine.forms.limits import FormLimits, check_form, check_size, longest_chain
from trunkattn.engine.forms.structured_output import StructuredOutputs

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "pets": {"type": "array", "items": {"enum": ["cat", "dog"]}, "maxItems": 2},
    },
    "required": ["name", "age", "pets"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
PROMPT = "Describe a person as JSON. " * 6


def form(**forms: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(**forms)


@pytest.fixture(scope="module")
def llm(tiny_speaker: Path) -> LLM:
    return LLM(tiny_speaker, num_pages=200)


def check_person(text: str) -> None:
    person = json.loads(text)
    assert set(person) == {"name", "age", "pets"}
    assert isinstance(person["name"], str) and len(person["name"]) <= 12 and 0 <= person["age"] <= 120
    assert len(person["pets"]) <= 2 and set(person["pets"]) <= {"cat", "dog"}


def test_a_model_that_is_warm_reads_its_vocabulary_for_no_request(
    tiny_speaker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading it stops every thread of a server."""
    warm = LLM(tiny_speaker, num_pages=24)
    warm.warm_up()
    forms = warm.engine.token_rules.structured_outputs

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("it reads the vocabulary")

    monkeypatch.setattr("llguidance.hf.from_tokenizer", refuse)
    monkeypatch.setattr(type(warm.get_tokenizer()), "backend_tokenizer", property(refuse))
    assert forms.start(form(choice=["yes", "no"])) is not None
    assert json.loads(forms.tokenizer_source()[0])["model"]


def test_what_llguidance_cannot_read_is_refused_when_a_form_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    forms = StructuredOutputs(None, 100, [1])
    forms.warm_up()
    with pytest.raises(ValueError, match="expected a model with a tokenizer"):
        forms.start(form(choice=["yes"]))
    monkeypatch.setitem(sys.modules, "llguidance", None)
    forms.warm_up()
    with pytest.raises(ImportError, match="needs the package llguidance"):
        forms.start(form(choice=["yes"]))


def test_answers_are_json_of_the_schema_whatever_the_budget(llm: LLM, tiny_speaker: Path) -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=80, structured_outputs=form(json=json.dumps(SCHEMA)))
    prompts = [PROMPT + "Ann:", PROMPT + "A man called Bob, who has a dog:"]
    outputs = llm.generate(prompts, params)
    answers = [answer for output in outputs for answer in output.outputs]
    for answer in answers:
        assert answer.finish_reason == "stop" and answer.stop_reason is None
        check_person(answer.text)
    assert len({answer.text for answer in answers}) > 2
    assert outputs[1].num_cached_tokens > 0, "the prompts share a prefix"
    small = LLM(tiny_speaker, num_pages=9, max_num_seqs=4, max_num_batched_tokens=8)
    again = [answer.token_ids for output in small.generate(prompts, params) for answer in output.outputs]
    assert again == [answer.token_ids for answer in answers]
    assert small.stats.preemptions > 0


def test_answers_match_a_choice_a_regex_or_a_grammar(llm: LLM) -> None:
    greedy: dict[str, Any] = {"temperature": 0, "max_tokens": 30}
    forms = [
        form(choice=["Rome", "Paris"]),
        form(choice=["Århus"]),
        form(regex=r"\d{3}-[a-f]{2,4}"),
        form(grammar='start: "x" ("," NUMBER)~3 "."\nNUMBER: /[1-9]/'),
        form(json_object=True),
    ]
    params = [SamplingParams(**greedy, structured_outputs=one) for one in forms]
    free = llm.generate("Hello", SamplingParams(**greedy))[0].outputs[0].token_ids
    *outputs, free_too = llm.generate(["Hello"] * 6, [*params, SamplingParams(**greedy)])
    choice, danish, regex, grammar, an_object = (output.outputs[0] for output in outputs)
    assert choice.text in ("Rome", "Paris") and danish.text == "Århus"
    assert re.fullmatch(r"\d{3}-[a-f]{2,4}", regex.text)
    assert re.fullmatch(r"x(,[1-9]){3}\.", grammar.text)
    assert an_object.text.startswith("{")
    assert free_too.outputs[0].token_ids == free, "other requests of the batch are free"
    assert {answer.finish_reason for answer in (choice, danish, regex, grammar)} == {"stop"}


END = "<|im_end|>"  # end-of-sequence, as a text
FORMS_THAT_SAY_IT = [
    (form(choice=[f"a{END}b"]), f"a{END}b"),
    (form(regex=r"a<\|im_end\|>b"), f"a{END}b"),
    (form(grammar=f'start: "a{END}b" // the end'), f"a{END}b"),
    (form(json={"const": f"a{END}b"}), f'"a{END}b"'),
    (form(choice=['a\x7f\x00\u2028"\\\nb']), 'a\x7f\x00\u2028"\\\nb'),
]


@pytest.mark.parametrize(("wanted", "text"), FORMS_THAT_SAY_IT)
def test_a_form_holds_any_text_that_of_a_special_token_too(
    llm: LLM, wanted: StructuredOutputsParams, text: str
) -> None:
    (output,) = llm.generate("Hello", SamplingParams(seed=1, max_tokens=60, structured_outputs=wanted))
    assert output.outputs[0].text == text and output.outputs[0].finish_reason == "stop"


def test_smollm2_chooses_well(smollm2: Any) -> None:
    params = SamplingParams(temperature=0, structured_outputs=form(choice=["Rome", "Paris", "Oslo"]))
    (output,) = LLM(smollm2.path, num_pages=20).generate("The capital of France is ", params)
    assert output.outputs[0].text == "Paris"


def test_an_end_that_is_held_back_is_an_error_of_this_request_alone(llm: LLM) -> None:
    params = SamplingParams(temperature=0, min_tokens=9, max_tokens=12, structured_outputs=form(choice=["Paris"]))
    free = SamplingParams(temperature=0, max_tokens=12)
    answer, other = (output.outputs[0] for output in llm.generate(["France:", "Italy:"], [params, free]))
    assert answer.finish_reason == "error" and answer.text == "Paris"
    assert answer.error is not None and "structured_outputs" in answer.error
    assert len(other.token_ids) == 12 and other.error is None


BAD_FORMS: list[tuple[StructuredOutputsParams, str]] = [
    (form(json={"type": "banana"}), "json={'type': 'banana'}: expected a valid json; .*banana"),
    (form(json="{"), "json='{': expected a JSON schema"),
    (form(json={"a": {1, 2}}), r"json=.*: expected a JSON schema"),
    (form(regex="(a"), r"regex='\(a': expected a valid regex; .*unclosed group"),
    (form(grammar="begin: 1"), "grammar='begin: 1': expected a valid grammar"),
]


@pytest.mark.parametrize(("bad", "message"), BAD_FORMS)
def test_a_bad_form_is_refused_by_name_before_anything_starts(
    llm: LLM, bad: StructuredOutputsParams, message: str
) -> None:
    with pytest.raises(ValueError, match=f"structured_outputs: {message}"):
        llm.generate("Hello", SamplingParams(structured_outputs=bad))
    assert not llm.engine.has_unfinished


def test_exactly_one_form_is_taken() -> None:
    with pytest.raises(ValueError, match="exactly one of json, regex, choice, grammar, json_object"):
        form()
    with pytest.raises(ValueError, match=r"structured_outputs=\['regex', 'choice'\]"):
        form(regex="a", choice=["a"])
    for bad in ({"regex": 5}, {"regex": ""}, {"choice": "abc"}, {"choice": [1]}, {"json": 5}, {"grammar": []}):
        with pytest.raises(TypeError, match=f"{next(iter(bad))}=.*: expected"):
            form(**bad)
    with pytest.raises(ValueError, match=r"choice=\[\]: expected at least one string"):
        form(choice=[])


def test_a_model_without_a_tokenizer_has_no_forms() -> None:
    with pytest.raises(ValueError, match="expected a model with a tokenizer"):
        StructuredOutputs(None, 10, [1]).start(form(regex="a"))


def test_a_missing_library_is_named(smollm2_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ImportError, match=r"structured_outputs needs the package llguidance; pip install"):
        StructuredOutputs(smollm2_tokenizer, 10, [1]).start(form(regex="a"))


def test_compiled_forms_are_kept_up_to_their_bytes(smollm2_tokenizer: Any) -> None:
    forms = StructuredOutputs(smollm2_tokenizer, len(smollm2_tokenizer), [2], FormLimits(cache_bytes=1 << 20))
    forms.start(form(regex="a+"))
    assert forms.has_compiled(forms.source(form(regex="a+")).grammar)
    for number in range(20):
        forms.start(form(regex=f"a{number}"))
    assert 4 < len(forms._compiled) < 17 and not forms.has_compiled(forms.source(form(regex="a+")).grammar)


def test_what_failed_is_remembered_without_its_text(smollm2_tokenizer: Any) -> None:
    forms = StructuredOutputs(smollm2_tokenizer, len(smollm2_tokenizer), [2])
    with pytest.raises(ValueError, match="expected a valid json"):
        forms.start(form(json={"type": "nonsense", "description": "x" * 100_000}))
    kept = [*forms._failed, *forms._failed.values()]
    assert len(kept) == 2 and sum(map(len, kept)) < 1000


def test_the_digits_of_a_schema_are_counted_before_they_are_written() -> None:
    for numbers in ([10**4000] * 100, [10**4000, -(10**4000)] * 50):
        schema = {"enum": numbers}
        with pytest.raises(ValueError, match=r"structured_outputs\.json has \d+ digits: expected at most 120000"):
            check_size(schema, FormLimits())
    check_size({"enum": [10**300] * 300, "minimum": True}, FormLimits())


def test_what_failed_once_is_not_compiled_again(smollm2_tokenizer: Any) -> None:
    forms = StructuredOutputs(smollm2_tokenizer, len(smollm2_tokenizer), [2])
    with pytest.raises(ValueError, match="unclosed group"):
        forms.start(form(regex="(a"))
    with pytest.raises(ValueError, match="unclosed group"):
        forms.source(form(regex="(a"))
    source = forms.source(form(regex="ab"))
    forms.refuse(source.grammar, "it takes too long")
    for one in (form(regex="ab"), source):
        with pytest.raises(ValueError, match="regex='ab': expected a valid regex; it takes too long"):
            forms.start(one)


def test_threads_share_the_compiled_forms(smollm2_tokenizer: Any) -> None:
    forms = StructuredOutputs(smollm2_tokenizer, len(smollm2_tokenizer), [2])
    words = [str(number) for number in range(100)] * 2
    with ThreadPoolExecutor(8) as threads:
        states = list(threads.map(lambda word: forms.start(form(choice=[word])), words))
    for word, state in zip(words[:9], states, strict=False):
        first = smollm2_tokenizer.encode(word[0], add_special_tokens=False)[0]
        assert state.allowed([])[first]


CHAIN = {f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(2000)}
LISTS = {"anyOf": [*({"items": {"$ref": f"#/anyOf/{i + 1}"}} for i in range(900)), {}]}
CODED = {f"d {i}": {"items": {"$ref": f"#/%24defs/d%20{i + 1}"}} for i in range(900)}
ANCHORS = {f"d{i}": {"$anchor": f"a{i}", "items": {"$ref": f"#a{i + 1}"}} for i in range(900)}
RULES = "\n".join(f'r{i}: "a" r{i + 1}' for i in range(3000))
TOO_LARGE: list[tuple[dict[str, Any], str]] = [
    ({"json": {"$defs": CHAIN, "$ref": "#/$defs/d0"}}, "json has 2002 references in a row: expected at most 100"),
    ({"json": LISTS}, "json has 901 references in a row: expected at most 100"),
    ({"json": {"$defs": CODED, "$ref": "#/$defs/d%200"}}, "json has 902 references in a row: expected at most 100"),
    ({"json": {"$defs": ANCHORS, "$ref": "#a0"}}, "901 references that are no paths within it: expected at most 100"),
    ({"grammar": f"start: %json\n{json.dumps(LISTS)}"}, "901 references in a row: expected at most 100"),
    ({"json": {"patternProperties": {"a" * 9000: {}}}}, "json: a pattern has 9000 characters: expected at most 8192"),
    ({"json": {"pattern": "a\\"}}, "json: a pattern ends in a backslash: expected a character after it"),
    ({"regex": "a\\\\\\"}, "regex ends in a backslash: expected a character after it"),
    ({"json": {"properties": {f"p{i}": {} for i in range(5001)}}}, "json has 5001 properties: expected at most 5000"),
    ({"json": {"enum": list(range(1001))}}, "json has 1001 values of enums: expected at most 1000"),
    ({"json": {"description": "x" * 130_000}}, "characters: expected at most 120000"),
    ({"json": {"examples": [["x" * 130_000]]}}, "characters: expected at most 120000"),
    ({"json": {"examples": [1] * 60_000}}, "json has 60002 values or more: expected at most 50000"),
    ({"json": " " * 2_000_000 + "{}"}, "json has 2000002 characters of JSON"),
    ({"json": {"pattern": "a" * 9000}}, "json: a pattern has 9000 characters: expected at most 8192"),
    ({"json": '{"not": ' * 80 + "{}" + "}" * 80}, "json has 65 levels of nesting or more: expected at most 64"),
    ({"regex": "(a|b)?" * 3000}, "regex has 18000 characters: expected at most 8192"),
    ({"choice": [str(i) for i in range(1001)]}, "choice has 1001 texts: expected at most 1000"),
    ({"grammar": f'start: r0\n{RULES}\nr3000: "b"'}, "grammar has 3002 rules: expected at most 1000"),
    ({"grammar": f'start: r0\n{RULES[:3000]}'}, "rules that name one another in a row: expected at most 100"),
    ({"grammar": f"start: {'a ' * 70_000}"}, "grammar has 140007 characters"),
]  # fmt: skip


@pytest.mark.parametrize(("large", "message"), TOO_LARGE, ids=[message for _, message in TOO_LARGE])
def test_a_form_over_a_limit_is_never_compiled(
    smollm2_tokenizer: Any, monkeypatch: pytest.MonkeyPatch, large: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(llguidance, "LLMatcher", None)  # what is asked of it raises
    with pytest.raises(ValueError, match=f"structured_outputs.*{message}"):
        StructuredOutputs(smollm2_tokenizer, len(smollm2_tokenizer), [2]).start(form(**large))


def test_values_are_counted_up_to_the_limit() -> None:
    many: list[Any] = [1]
    for _ in range(60):
        many = [many] * 10
    with pytest.raises(ValueError, match="values or more: expected at most 50000"):
        check_form(form(json={"enum": many}), {"enum": many}, FormLimits())


def test_chains_are_counted_without_recursion() -> None:
    assert longest_chain({"a": ["b"], "b": ["c"], "c": ["a"]}) == 3, "a way back adds nothing"
    assert longest_chain({str(i): [str(i + 1)] for i in range(100_000)}) == 100_001
    assert longest_chain({}) == 0 and longest_chain({"a": ["a", "b"], "b": []}) == 2


NAMES = ["".join(pair) for pair in product(*([["a", "%61"]] * 12))]  # all of them of one part
REFERENCES = {"$defs": {"a" * 12: {f"p{i}": {"$ref": f"#/$defs/{name}"} for i, name in enumerate(NAMES[:3000])}}}


@pytest.mark.parametrize(
    "form",
    [
        form(grammar="\n" * 119_999),
        form(grammar="start" + " " * 110_000),
        form(grammar="start [x]" + " \n" * 50_000 + ".1"),
        form(json=REFERENCES),
    ],
)
def test_a_form_is_checked_in_linear_time(form: StructuredOutputsParams) -> None:
    schema, began = form.json, time.thread_time()
    check_form(form, schema, FormLimits())
    assert time.thread_time() - began < 5


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"structured_outputs": form(json={"$ref": "#"})}, "structured_outputs: json: a value of '#' never ends"),
        (
            {"structured_outputs": form(regex=r"[^\s\S]")},
            r"structured_outputs: llguidance cannot go on \(there is a place in it that nothing can follow\)",
        ),
        (
            {"structured_outputs": form(regex="[0-9]+"), "allowed_token_ids": [2]},
            "allowed_token_ids=.2,?.: expected a token",
        ),
    ],
)
def test_a_form_that_nothing_can_begin_is_refused(llm: LLM, parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        llm.generate("Hello", SamplingParams(**parameters))
    assert len(str(raised.value)) < 400


def test_a_choice_may_begin_another_one(llm: LLM) -> None:
    choices = ["a", "ab", *(f"c{number}" for number in range(990))]
    params = SamplingParams(n=8, seed=1, max_tokens=9, structured_outputs=form(choice=choices))
    answers = llm.generate("Hello", params)[0].outputs
    assert all(answer.text in choices and answer.finish_reason == "stop" for answer in answers)


def test_end_of_sequence_is_allowed_exactly_when_the_answer_is_complete(smollm2_tokenizer: Any) -> None:
    vocab_size, eos = len(smollm2_tokenizer) + 5, 2  # logits of more tokens than the tokenizer has
    forms = StructuredOutputs(smollm2_tokenizer, vocab_size, [eos])
    state = forms.start(form(regex="ab?"))
    tokens: list[int] = []
    seen = []
    for text in ("a", "b"):
        mask = state.allowed(tokens)
        assert mask.shape == (vocab_size,) and not mask[len(smollm2_tokenizer) :].any()
        seen.append(bool(mask[eos]))
        tokens += smollm2_tokenizer.encode(text, add_special_tokens=False)
    mask = state.allowed(tokens)
    assert seen == [False, True] and mask.nonzero()[0].tolist() == [eos]
    with pytest.raises(ValueError, match="cannot go on"):
        forms.start(form(regex="ab?")).allowed([eos, eos])
