"""Prompts and conversations: what becomes of them, and what a bad one says."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from trunkattn.engine import LLM, SamplingParams
from trunkattn.engine.prompts import ChatOptions, fill_template

SHORT = SamplingParams(temperature=0, max_tokens=3)
HALF_A_PAIR = "bad \ud83d"
USER = {"role": "user", "content": "Name a river."}
ASSISTANT = {"role": "assistant", "content": "The river"}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def llm(tiny_speaker: Path) -> LLM:
    return LLM(tiny_speaker, num_pages=64)


def rendered(llm: LLM, messages: Any, **options: Any) -> str:
    return llm.tokenizer.decode(llm.render_chat(messages, **options))


def test_a_conversation_begins_or_continues_an_answer(llm: LLM) -> None:
    begun = rendered(llm, [USER])
    assert begun.endswith("<|im_start|>user\nName a river.<|im_end|>\n<|im_start|>assistant\n")
    assert begun == rendered(llm, [USER], add_generation_prompt=False) + "<|im_start|>assistant\n"
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert rendered(llm, [USER, ASSISTANT], **options) == begun + "The river"
    (output,) = llm.chat([USER, ASSISTANT], SHORT, **options)
    assert output.prompt_token_ids == llm.render_chat([USER, ASSISTANT], **options)
    with pytest.raises(ValueError, match="continue_final_message=True: expected False with add_generation_prompt"):
        llm.chat([USER], continue_final_message=True)


def test_parts_of_text_are_one_text(llm: LLM) -> None:
    parts = [{"type": "text", "text": "Name"}, {"type": "text", "text": "a river."}]
    assert llm.render_chat([{"role": "user", "content": parts}]) == llm.render_chat(
        [{"role": "user", "content": "Name\na river."}]
    )
    assert parts[0] == {"type": "text", "text": "Name"}


def test_tools_and_variables_reach_the_template(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{% for tool in tools or [] %}{{ tool.function.name }};{% endfor %}{{ mood }}{{ messages[0].content }}"
    monkeypatch.setattr(llm.tokenizer, "chat_template", template)
    assert rendered(llm, [USER], tools=[TOOL], chat_template_kwargs={"mood": "calm "}) == "weather;calm Name a river."
    assert rendered(llm, [USER], tools=[]) == "Name a river."
    (output,) = llm.chat([[USER]], SHORT, tools=[TOOL], chat_template_kwargs={"mood": "calm "})
    assert llm.tokenizer.decode(output.prompt_token_ids) == "weather;calm Name a river."


ALL = "{% for m in messages %}{{ m.content }}{% endfor %}"
SHOWS_TOOLS = {
    "anywhere": "{{ tools }}" + ALL,
    "after a default": "{% if not tools is defined %}{% set tools = none %}{% endif %}{{ tools }}" + ALL,
    "beside the last question": "{% for m in messages %}{% if loop.last and m.role == 'user' and tools %}{{ tools }}"
    "{% endif %}{{ m.content }}{% endfor %}",
    "where a variable asks for them": "{% if mood == 'calm' %}{{ tools }}{% endif %}" + ALL,
    "beside a system message": "{% if messages[0].role == 'system' %}{{ tools }}{% endif %}" + ALL,
    "beside two messages": "{% if messages | length == 2 %}{{ tools }}{% endif %}" + ALL,
    "after a refusal": "{% if messages[0].content == 'a' %}{{ raise_exception('no') }}{% endif %}"
    "{% if messages | length == 1 %}{{ tools }}{% endif %}" + ALL,
    "in a macro": "{% macro list() %}{{ tools }}{% endmacro %}{{ list() }}" + ALL,
    "in one of two templates": {"default": ALL, "tool_use": "{{ tools }}" + ALL},
}


SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize("place", SHOWS_TOOLS)
def test_tools_pass_if_the_template_shows_them_anywhere(llm: LLM, monkeypatch: Any, place: str) -> None:
    """A template may show tools beside the question only: the turn after a call has none, as the model was trained."""
    monkeypatch.setattr(llm.tokenizer, "chat_template", SHOWS_TOOLS[place])
    variables = {"mood": "calm"} if "variable" in place else None
    messages = [SYSTEM, USER] if "messages" in place or "system" in place else [USER]
    assert "weather" in rendered(llm, messages, tools=[TOOL], chat_template_kwargs=variables)
    rendered(llm, [*messages, ASSISTANT][-2:], tools=[TOOL], chat_template_kwargs=variables)


HIDES_TOOLS = (
    ALL,
    ALL + "{{ messages[0].tools }}",
    "{% macro m(tools) %}{{ tools }}{% endmacro %}{{ m(1) }}" + ALL,
    "{% if tools %}{% endif %}" + ALL,
    "{% if tools is defined %}{% set found = tools %}{% endif %}" + ALL,
    "{% if mood == 'calm' and tools %}{{ tools }}{% endif %}" + ALL,
    {"default": "{{ tools }}.", "tool_use": "{% if tools %}{% endif %}" + ALL},
)


@pytest.mark.parametrize("template", HIDES_TOOLS, ids=str)
def test_tools_that_the_template_never_shows_are_refused(llm: LLM, monkeypatch: Any, template: Any) -> None:
    monkeypatch.setattr(llm.tokenizer, "chat_template", template)
    for ask in (llm.chat, llm.render_chat):
        with pytest.raises(ValueError, match=r"^tools: the model's chat template shows none"):
            ask([USER], tools=[TOOL])
    assert rendered(llm, [USER], tools=[]) == rendered(llm, [USER])


def test_a_variable_that_the_template_never_reads_is_refused(llm: LLM, monkeypatch: Any) -> None:
    monkeypatch.setattr(llm.tokenizer, "chat_template", "{{ eos_token }}{{ mood or tone }}" + ALL)
    assert rendered(llm, [USER], chat_template_kwargs={"tone": "calm "}).endswith("calm Name a river.")
    with pytest.raises(ValueError, match=r"kwargs\.mod: the .* never reads it; .* which are mood, tone$"):
        llm.chat([USER], chat_template_kwargs={"tone": "calm", "mod": "calm"})
    monkeypatch.setattr(llm.tokenizer, "chat_template", ALL)
    with pytest.raises(ValueError, match=r"kwargs\.mood: the .* never reads it; it has no variables, so leave it out$"):
        llm.chat([USER], chat_template_kwargs={"mood": "calm"})


def test_a_tokenizer_that_fills_templates_itself_may_read_anything(llm: LLM, monkeypatch: Any) -> None:
    def fill(messages: Any, tools: Any = None, **options: Any) -> str:
        return f"{tools[0]['function']['name']} {options['mood']}"

    own = type("Own", (type(llm.tokenizer),), {"apply_chat_template": staticmethod(fill)})
    monkeypatch.setattr(llm.tokenizer, "__class__", own)
    assert rendered(llm, [USER], tools=[TOOL], chat_template_kwargs={"mood": "calm"}) == "weather calm"


@pytest.mark.parametrize("template", ["{% if %}", {"tool_use": ALL}])
def test_a_damaged_template_says_what_is_wrong_with_it(llm: LLM, monkeypatch: Any, template: Any) -> None:
    monkeypatch.setattr(llm.tokenizer, "chat_template", template)
    with pytest.raises(ValueError, match="the model's chat template refuses it"):
        llm.chat([USER], chat_template_kwargs={"mood": "calm"})


def test_a_template_that_writes_nothing_is_blamed(llm: LLM, monkeypatch: Any) -> None:
    monkeypatch.setattr(llm.tokenizer, "chat_template", "{% if false %}{{ messages }}{% endif %}")
    with pytest.raises(ValueError, match=r"^messages=.*: the model's chat template writes nothing of it$"):
        llm.chat([USER])


@pytest.mark.parametrize("arguments", ['{"city": "Rome"}', {"city": "Rome"}])
def test_a_call_of_a_history_is_what_the_server_makes_of_it(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, arguments: Any
) -> None:
    """OpenAI's messages have arguments as text and a null for content, and templates write mappings and add texts."""
    template = (
        "{% for m in messages %}{{ m.content + '.' }}{% for call in m.tool_calls or [] %}"
        "{{ call.function.arguments | tojson }}{% endfor %}{{ 'tool_calls' in m }}{% endfor %}"
    )
    monkeypatch.setattr(llm.tokenizer, "chat_template", template)
    function = {"name": "weather", "arguments": arguments}
    call = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}
    assert rendered(llm, [call], add_generation_prompt=False) == '.{"city": "Rome"}True'
    assert rendered(llm, [{"role": "assistant", "content": "a", "tool_calls": []}]) == "a.False"
    assert function == {"name": "weather", "arguments": arguments}


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        ("", "{}"),
        ("null", "{}"),
        ("[1]", '"[1]"'),
        ("a b", '"a b"'),
        (r'{"a": "\ud83d\ud83d\ude00"}', r'{"a": "\\ud83d😀"}'),
    ],
)
def test_arguments_are_read_whatever_they_are(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, arguments: str, read: str
) -> None:
    template = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    monkeypatch.setattr(llm.tokenizer, "chat_template", template)
    calls = [{"type": "function", "function": {"name": "weather", "arguments": arguments}}]
    assert rendered(llm, [{"role": "assistant", "tool_calls": calls}]) == read


BAD_MESSAGES: list[tuple[Any, str]] = [
    ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], r"messages\[0\].content\[0\].type="),
    ([USER, {"role": "user", "content": ["x"]}], r"messages\[1\].content\[0\]='x': expected a part of the type"),
    ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\].content\[0\].text=None: expected a string"),
    ([{"role": "user", "content": HALF_A_PAIR}], r"messages\[0\].content='bad .*': expected Unicode text"),
    ([{"role": HALF_A_PAIR, "content": "x"}], r"messages\[0\].role='bad .*': expected Unicode text"),
    ([USER, {"role": "user"}], "the model's chat template refuses it"),
    ([{"role": "user", "content": b"x"}], r"messages\[0\].content=b'x': expected a text or a list of parts"),
    ([{"role": "user", "content": math.nan}], r"messages\[0\].content=nan: expected a text or a list of parts"),
    (
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 100_000}}]}],
        r"messages\[0\].tool_calls\[0\].function.arguments=.*: expected JSON of fewer levels",
    ),
    ([], r"messages=\[\]: expected at least one message"),
]


@pytest.mark.parametrize(("messages", "message"), BAD_MESSAGES)
def test_a_bad_message_is_named(llm: LLM, messages: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        llm.chat(messages)
    assert not llm.engine.has_unfinished


BAD_CHAT_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"tools": "weather"}, "tools='weather': expected a list of mappings"),
    ({"tools": ["weather"]}, r"tools=\['weather'\]"),
    ({"chat_template_kwargs": ["a"]}, r"chat_template_kwargs=\['a'\]: expected a mapping"),
    ({"add_generation_prompt": 1}, "add_generation_prompt=1: expected True or False"),
    ({"continue_final_message": "no"}, "continue_final_message='no'"),
]


@pytest.mark.parametrize(("options", "message"), BAD_CHAT_OPTIONS)
def test_a_bad_option_of_a_chat_is_named(llm: LLM, options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        llm.chat([USER], **options)


def test_text_that_is_not_unicode_is_named_and_nothing_starts(llm: LLM) -> None:
    for bad in (HALF_A_PAIR, {"prompt": HALF_A_PAIR}):
        with pytest.raises(ValueError, match=r"prompts\[1\]='bad .ud83d': expected Unicode text, and character 4"):
            llm.generate(["good", bad], SHORT)
    for name in ("stop", "bad_words"):
        with pytest.raises(ValueError, match=f"{name}=.*: expected Unicode text"):
            SamplingParams(**{name: [HALF_A_PAIR]})
    assert not llm.engine.has_unfinished


def test_a_template_that_writes_half_a_surrogate_pair_is_named(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.tokenizer, "chat_template", "{{ tools[0].name }}{{ messages[0].content }}")
    with pytest.raises(ValueError, match=r"messages='bad .ud83dName.*: expected Unicode text"):
        llm.chat([USER], tools=[{"name": HALF_A_PAIR}])


def test_a_template_needs_a_tokenizer() -> None:
    with pytest.raises(ValueError, match="the model has no chat template"):
        fill_template(None, [USER], ChatOptions())


def test_bad_words_never_appear(llm: LLM) -> None:
    free = llm.generate("Hello", SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))[0].outputs[0]
    word = llm.tokenizer.decode(free.token_ids[3:4]).strip()
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, bad_words=[word])
    held = llm.generate("Hello", params)[0].outputs[0]
    assert held.token_ids[:3] == free.token_ids[:3] and free.token_ids[3] not in held.token_ids


def test_the_models_own_parameters_are_the_default(tiny_speaker: Path, tmp_path: Path) -> None:
    for file in tiny_speaker.iterdir():
        (tmp_path / file.name).symlink_to(file)
    plain = LLM(tiny_speaker, num_pages=16)
    assert plain.get_default_sampling_params() == SamplingParams()
    own = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1, "max_new_tokens": 5}
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": True, **own}))
    assert GenerationConfig.from_pretrained(tmp_path).top_k == 20
    llm = LLM(tmp_path, num_pages=16, seed=1)
    expected = {name: value for name, value in own.items() if name != "max_new_tokens"}
    assert llm.get_default_sampling_params() == SamplingParams(**expected, max_tokens=5)  # type: ignore[arg-type]
    assert len(llm.generate("Hello")[0].outputs[0].token_ids) <= 5
    assert llm.get_tokenizer() is llm.tokenizer


def test_an_emptied_prefix_cache_has_no_hits(llm: LLM) -> None:
    prompt = "A long prompt. " * 10
    cached = [llm.generate(prompt, SHORT)[0].num_cached_tokens for _ in range(2)]
    llm.reset_prefix_cache()
    assert cached[1] > 0 == llm.generate(prompt, SHORT)[0].num_cached_tokens
