"""Prompts: turns what a user gives, text, token ids or messages, into token ids. Errors name what is wrong."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from inspect import signature
from numbers import Integral
from types import MappingProxyType
from typing import Any, Final

from jinja2.meta import find_undeclared_variables
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template

from trunkattn.validate import check_bool, check_text, shown

# Parameters of a tokenizer's `apply_chat_template`, and what it calls the conversation: they are no variables of a
# template. Whoever sets `chat_template` brings a program.
RESERVED: Final = frozenset(signature(PreTrainedTokenizerBase.apply_chat_template).parameters) | {"messages"}

# The simplest conversations and tool, by which a template shows whether it shows tools.
_QUESTION: Final = ({"role": "user", "content": "a"},)
_SYSTEM: Final = ({"role": "system", "content": "b"},)
_TOOL: Final = MappingProxyType(
    {"type": "function", "function": {"name": "c", "description": "d", "parameters": {"type": "object"}}}
)

_HALF_A_PAIR: Final = re.compile("[\ud800-\udfff]")

Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]


@dataclass(frozen=True)
class ChatOptions:
    """How a conversation becomes a prompt. The names are vLLM's.

    Attributes:
        add_generation_prompt: end with the header of the assistant's next message.
        continue_final_message: end within the last message, which the answer continues.
        tools: functions that the model may call, as JSON schemas in OpenAI's form. Only a chat template that reads them
            can show them to the model.
        chat_template_kwargs: further variables that the model's chat template reads, and none of `RESERVED`.

    Raises:
        TypeError, ValueError: naming the option, its value and what is expected.
    """

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Sequence[Mapping[str, Any]] | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        check_bool("add_generation_prompt", self.add_generation_prompt)
        check_bool("continue_final_message", self.continue_final_message)
        if self.add_generation_prompt and self.continue_final_message:
            raise ValueError(
                "continue_final_message=True: expected False with add_generation_prompt=True, because an answer either "
                "continues the last message or begins its own; give add_generation_prompt=False"
            )
        tools = self.tools
        is_list = isinstance(tools, Sequence) and not isinstance(tools, str | bytes)
        if tools is not None and not (is_list and all(isinstance(tool, Mapping) for tool in tools)):
            raise TypeError(f"tools={shown(tools)}: expected a list of mappings, one for each function")
        variables = self.chat_template_kwargs
        if variables is not None and not (isinstance(variables, Mapping) and all(type(k) is str for k in variables)):
            raise TypeError(f"chat_template_kwargs={shown(variables)}: expected a mapping from names to values")
        for name in variables or ():
            if name in RESERVED:
                raise ValueError(
                    f"chat_template_kwargs.{name}: expected only variables of the template, and {name} is a parameter "
                    f"of apply_chat_template; leave it out"
                )

    def arguments(self) -> dict[str, Any]:
        """Arguments of a tokenizer's `apply_chat_template`."""
        return {
            **(self.chat_template_kwargs or {}),
            "tools": [dict(tool) for tool in self.tools] if self.tools else None,
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
            "tokenize": False,
        }


def check_list(name: str, value: Any) -> None:
    """Raises TypeError or ValueError unless `value` is a list of messages."""
    if isinstance(value, str | bytes | bytearray) or not isinstance(value, Sequence):
        raise TypeError(f"{name}={shown(value)}: expected a list of messages, each with a role and a content")
    if not value:
        raise ValueError(f"{name}={value!r}: expected at least one message")


def is_single(prompts: Any) -> bool:
    """Whether `prompts` is one prompt, not a list of them."""
    return isinstance(prompts, str | Mapping) or (len(prompts) > 0 and isinstance(prompts[0], Integral))


def tokenize_prompt(tokenizer: Any | None, prompt: object, name: str) -> tuple[str | None, list[int]]:
    """A prompt's text, None if it has none, and token ids.

    Raises:
        TypeError, ValueError: naming the prompt by `name`. The engine checks the token ids.
    """
    if isinstance(prompt, Mapping):
        if len(prompt.keys() & {"prompt", "prompt_token_ids"}) != 1:
            raise ValueError(f"{name} has the keys {[*prompt]}: expected one of prompt and prompt_token_ids")
        others = [key for key in prompt if key not in ("prompt", "prompt_token_ids")]
        if others:
            raise ValueError(
                f"{name} has the keys {[*prompt]}: expected only prompt or prompt_token_ids, because nothing reads "
                f"{shown(others[0])}"
            )
        if isinstance(token_ids := prompt.get("prompt_token_ids"), str):
            raise TypeError(
                f"{name}.prompt_token_ids={shown(token_ids)}: expected a list of token ids; give a text as prompt"
            )
        prompt = prompt.get("prompt", token_ids)
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError(f"{name}={shown(prompt)}: expected token ids, because the model folder has no tokenizer")
        if not prompt:
            raise ValueError(f"{name}={shown(prompt)}: expected a prompt that is not empty")
        return prompt, tokenizer(check_text(name, prompt))["input_ids"]
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
        raise TypeError(
            f"{name}={shown(prompt)}: expected a string, a list of token ids, or a mapping with one of them"
        )
    return None, list(prompt)


def fill_template(tokenizer: Any | None, conversation: Any, options: ChatOptions, name: str = "messages") -> list[int]:
    """A conversation as token ids. Raises what `render_template` raises."""
    text = check_text(name, render_template(tokenizer, conversation, options, name))
    assert tokenizer is not None
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def render_template(
    tokenizer: Any | None,
    conversation: Any,
    options: ChatOptions,
    name: str = "messages",
    tools_may_be_hidden: bool = False,
) -> str:
    """A conversation as a text, by the tokenizer's chat template.

    Args:
        tokenizer: a transformers tokenizer, or None.
        conversation: the messages.
        options: see `ChatOptions`.
        name: what errors call the conversation.
        tools_may_be_hidden: the template need not show the tools, because something else makes the answer follow them.

    Raises:
        TypeError, ValueError: naming the bad message by `name` and its position, or an option that the template does
            not read; or the model has no chat template.
    """
    if tokenizer is None or not tokenizer.chat_template:
        raise ValueError(f"{name}: the model has no chat template; expected prompts, so call generate")
    check_list(name, conversation)
    messages = [_message(f"{name}[{position}]", message) for position, message in enumerate(conversation)]
    try:
        text = str(tokenizer.apply_chat_template(messages, **options.arguments()))
        hides_tools = not tools_may_be_hidden and _hides_tools(tokenizer, messages, options, text)
    except Exception as error:  # a template is a program, and may raise anything
        reason = shown(str(error) or type(error).__name__, most=300)[1:-1]
        raise ValueError(f"{name}={shown(conversation)}: the model's chat template refuses it: {reason}") from error
    if not text:
        raise ValueError(f"{name}={shown(conversation)}: the model's chat template writes nothing of it")
    if hides_tools:
        raise ValueError(
            "tools: the model's chat template shows none, so the model would not see them; leave them out, or use a "
            "model whose template shows them"
        )
    for unread in unread_variables(tokenizer, options):
        names = ", ".join(sorted(own_variables(tokenizer, options)))
        raise ValueError(
            f"chat_template_kwargs.{shown(unread)[1:-1]}: the model's chat template never reads it; "
            + (f"expected one of its variables, which are {names}" if names else "it has no variables, so leave it out")
        )
    return text


def unread_variables(tokenizer: Any, options: ChatOptions) -> list[str]:
    """The names of `chat_template_kwargs` that the chat template would ignore."""
    read = _variables(tokenizer, options)
    return [] if read is None else [name for name in options.chat_template_kwargs or () if name not in read]


def own_variables(tokenizer: Any, options: ChatOptions) -> frozenset[str]:
    """The variables that a chat template reads and that only `chat_template_kwargs` gives; none if that is unknown."""
    return (_variables(tokenizer, options) or frozenset()) - RESERVED - {*tokenizer.special_tokens_map}


def _hides_tools(tokenizer: Any, messages: Any, options: ChatOptions, text: str) -> bool:
    """Whether a template shows nothing of the tools, neither in a conversation nor in the simplest ones. Many show them
    only in some conversations, as the model was trained. text: what the template makes of the conversation."""
    template = _template(tokenizer, options) if options.tools else None
    special_tokens = tokenizer.special_tokens_map.items() if template else ()
    texts = frozenset((name, token) for name, token in special_tokens if isinstance(token, str))
    if template is None or _shows_tools(template, texts):
        return False
    bare = replace(options, tools=None).arguments()
    return bool(text == tokenizer.apply_chat_template(messages, chat_template=template, **bare))


@lru_cache
def _shows_tools(template: str, special_tokens: frozenset[tuple[str, str]]) -> bool:
    """Whether a template shows a tool in one of the simplest conversations. One that refuses them may show it in
    others."""

    def render(messages: Any, tools: Any) -> str:
        variables = {"messages": [*messages], "tools": tools, "documents": None, "add_generation_prompt": True}
        return str(compiled.render(**dict(special_tokens), **variables))

    try:
        if "tools" not in _variables_of(template):
            return False
        compiled = _compile_jinja_template(template)
        return any(
            render(messages, [dict(_TOOL)]) != render(messages, None) for messages in (_QUESTION, _SYSTEM + _QUESTION)
        )
    except Exception:  # it is foreign
        return True


def _variables(tokenizer: Any, options: ChatOptions) -> frozenset[str] | None:
    """The variables that the chat template reads anywhere. None: that is unknown, because there is none to be read, or
    because it is damaged, which filling it reports."""
    template = _template(tokenizer, options)
    try:
        return None if template is None else _variables_of(template)
    except Exception:  # it is foreign
        return None


def _template(tokenizer: Any, options: ChatOptions) -> str | None:
    """The chat template; None if the tokenizer fills templates by a program of its own, or has none of this kind."""
    if type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template:
        return None
    try:
        return str(tokenizer.get_chat_template(tools=options.arguments()["tools"]))
    except ValueError:
        return None


@lru_cache
def _variables_of(template: str) -> frozenset[str]:
    environment = _compile_jinja_template(template).environment  # it has transformers' own tags and functions
    return frozenset(find_undeclared_variables(environment.parse(template)))


def read_arguments(name: str, text: str) -> Any:
    """The mapping that the arguments of a call hold as JSON, empty for null or no text; the text itself if it holds
    none. Half of a surrogate pair, which models write and no tokenizer reads, becomes the text of its escape.

    Raises:
        ValueError: naming the arguments by `name`: they are nested too deeply to be read.
    """
    if not text.strip():
        return {}
    try:
        found = json.loads(text)
        if "\\u" in text:
            found = json.loads(_HALF_A_PAIR.sub(_escape, json.dumps(found, ensure_ascii=False)))
    except RecursionError as error:
        raise ValueError(f"{name}={shown(text)}: expected JSON of fewer levels") from error
    except ValueError:
        return text
    return {} if found is None else found if isinstance(found, dict) else text


def _escape(half: re.Match[str]) -> str:
    return rf"\\u{ord(half[0]):04x}"


def _message(name: str, message: Any) -> dict[str, Any]:
    """A checked message as templates read it, in the way of vLLM: the text parts of its content are joined by line
    breaks, a null is an empty content, arguments of calls are mappings, and a list of no calls is left out."""
    if not isinstance(message, Mapping):
        raise TypeError(f"{name}={shown(message)}: expected a mapping with a role and a content")
    if not isinstance(message.get("role"), str):
        raise ValueError(f"{name}={shown(message)}: expected a role that is a string")
    checked = dict(message)
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str | bytes):
        checked["content"] = "\n".join(_part(f"{name}.content[{i}]", part) for i, part in enumerate(content))
    elif not isinstance(content, str | Mapping | None):
        raise TypeError(f"{name}.content={shown(content)}: expected a text or a list of parts")
    calls = checked.pop("tool_calls", None)
    if content is None and (calls or "content" in checked):
        checked["content"] = ""
    if isinstance(calls, Sequence) and not isinstance(calls, str | bytes):
        calls = [_call(f"{name}.tool_calls[{i}]", call) for i, call in enumerate(calls)]
    if calls:
        checked["tool_calls"] = calls
    for key in ("role", "content"):
        if isinstance(checked.get(key), str):
            check_text(f"{name}.{key}", checked[key])
    return checked


def _call(name: str, call: Any) -> Any:
    """A call whose arguments are a mapping, if they are one as JSON. The template reads any other form as it is."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(given := function.get("arguments"), str):
        return call
    return {**call, "function": {**function, "arguments": read_arguments(f"{name}.function.arguments", given)}}


def _part(name: str, part: Any) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text":
        kind = part.get("type") if isinstance(part, Mapping) else None
        given = f"{name}.type={kind!r}" if kind is not None else f"{name}={shown(part)}"
        raise ValueError(f"{given}: expected a part of the type 'text'; this engine reads no images, audio or files")
    text = part.get("text")
    if not isinstance(text, str):
        raise TypeError(f"{name}.text={shown(text)}: expected a string")
    return text
