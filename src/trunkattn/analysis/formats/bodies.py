"""Bodies of requests and responses in OpenAI's form, which most logs hold in one place or another."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from trunkattn.analysis.formats.base import (
    Chat,
    Fields,
    Hashes,
    Prompt,
    answer_text,
    brief,
    first,
    integer,
    optional_integer,
    token_ids,
)

PROMPT_FIELDS = ("messages", "prompt", "input", "text", "input_ids", "prompt_token_ids")
NO_BLOCKS = 16  # tokens per block where only the length of a prompt is known


class ResponseFacts(NamedTuple):
    """What a response says of its tokens and answers. num_output_tokens and answer are those of one answer."""

    num_prompt_tokens: int | None
    num_output_tokens: int | None
    answer: str | None
    num_answers: int | None


def prompts_of(body: Fields) -> list[Prompt]:
    """The prompts in a request's body: usually one, several if `prompt` or `text` is a list of them.

    Raises:
        ValueError: there is none, or it has no known form.
    """
    messages = body.get("messages")
    if messages is not None:
        system = body.get("system")  # Anthropic's interface has the system prompt outside of the messages
        head = [{"role": "system", "content": system}] if isinstance(system, str | list) and system else []
        return [
            chat_of([*head, *messages] if isinstance(messages, list) else messages, first(body, "tools", "functions"))
        ]
    for name in PROMPT_FIELDS[1:]:
        value = body.get(name)
        if value is not None and name == "input":
            return [_response_input(value, body)]
        if value is not None:
            return _prompts(name, value)
    raise ValueError(f"no prompt: expected one of {', '.join(PROMPT_FIELDS)}")


def chat_of(messages: Any, tools: Any = None) -> Chat:
    """Messages, and the tools if they are a list."""
    is_list = isinstance(messages, list) and all(isinstance(message, Mapping) for message in messages)
    if not is_list or not messages:
        raise ValueError(f"messages={brief(messages)}: expected a list of objects, each with a role and a content")
    return Chat(messages, tools if isinstance(tools, list) else ())


def prompt_of_length(name: str, value: Any) -> Hashes:
    """A prompt of which only the length is known: it shares nothing."""
    return Hashes(np.zeros(0, dtype=np.int64), NO_BLOCKS, integer(name, value, 1))


def facts_of_response(response: Any, num_prompts: int = 1, num_asked: int = 1) -> ResponseFacts:
    """Token counts and the answer, from a response's body, from the pieces of a streamed response, or from a text.

    Args:
        response: the response.
        num_prompts: prompts of the request; its counts are divided among them.
        num_asked: answers to each prompt, if the response does not list them.
    """
    if isinstance(response, list) and any(isinstance(piece, Mapping) and "choices" in piece for piece in response):
        response = _joined([piece for piece in response if isinstance(piece, Mapping)])
    if not isinstance(response, Mapping):
        return ResponseFacts(None, None, answer_text(response), None)
    choices = first(response, "choices", "outputs")
    listed = -(-len(choices) // num_prompts) if isinstance(choices, list) else 0
    usage = first(response, "usage")
    usage = usage if isinstance(usage, Mapping) else {}
    num_output_tokens = optional_integer(usage, "completion_tokens", "output_tokens")
    if num_output_tokens is not None:
        num_output_tokens = -(-num_output_tokens // (num_prompts * (listed or num_asked)))
    num_prompt_tokens = _num_prompt_tokens(usage)
    if num_prompt_tokens is not None:
        num_prompt_tokens = -(-num_prompt_tokens // num_prompts)
    answer = choices[0] if isinstance(choices, list) and choices else first(response, "output") or response
    return ResponseFacts(num_prompt_tokens, num_output_tokens, answer_text(answer), listed or None)


def _num_prompt_tokens(usage: Fields) -> int | None:
    """All tokens of a prompt. Anthropic's interface counts cached tokens separately."""
    count = optional_integer(usage, "prompt_tokens", "input_tokens")
    if count is None or first(usage, "prompt_tokens") is not None:
        return count
    return count + sum(optional_integer(usage, f"cache_{which}_input_tokens") or 0 for which in ("read", "creation"))


def _joined(pieces: Sequence[Fields]) -> Fields:
    """One response, joined from the pieces of a stream: the texts of all answers, and the last usage."""
    deltas: dict[int, list[str]] = {}
    for piece in pieces:
        choices = piece.get("choices")
        for choice in choices if isinstance(choices, list) else []:
            index = first(choice, "index") if isinstance(choice, Mapping) else None
            text = answer_text(first(choice, "delta", "text")) if isinstance(choice, Mapping) else None
            deltas.setdefault(index if isinstance(index, int) else 0, []).append(text or "")
    usages = [piece["usage"] for piece in pieces if piece.get("usage")]
    return {"choices": ["".join(some) for some in deltas.values()], "usage": usages[-1] if usages else None}


def num_answers_of(*bodies: Any) -> int:
    """The number of answers that are asked for: `n` of the first body that has it, else 1. A list counts as its first
    element."""
    for body in bodies:
        body = body[0] if isinstance(body, list) and body else body
        number = optional_integer(body, "n", "best_of", least=1) if isinstance(body, Mapping) else None
        if number is not None:
            return number
    return 1


def _prompts(name: str, value: Any) -> list[Prompt]:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError(f"{name}={brief(value)}: expected a text, token ids, or a list of them")
    if all(isinstance(item, str) for item in value):
        return list(value)
    if all(isinstance(item, list) for item in value):
        return [token_ids(name, item) for item in value]
    if all(isinstance(item, Mapping) for item in value):
        return [chat_of(value)]
    return [token_ids(name, value)]


def _response_input(value: Any, body: Fields) -> Prompt:
    """The prompt of OpenAI's newer interface: instructions, then a text or items with roles."""
    if isinstance(value, str):
        items: list[Any] = [{"role": "user", "content": value}]
    elif isinstance(value, Mapping) and "messages" in value:
        return chat_of(value["messages"], first(value, "tools") or first(body, "tools"))
    elif isinstance(value, list):
        items = [
            item if not isinstance(item, Mapping) or "role" in item else {"role": "tool", **item} for item in value
        ]
    else:
        raise ValueError(f"input={brief(value)}: expected a text or a list of messages")
    instructions = body.get("instructions")
    system = [{"role": "system", "content": instructions}] if isinstance(instructions, str) else []
    return chat_of(system + items, first(body, "tools"))
