"""JSON lines with messages or prompts, with or without times and answers: the form of most logs that people keep.

ShareGPT's conversations, vLLM's custom data sets and SGLang's agent traces are of this form too.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from trunkattn.analysis.formats.base import (
    Entry,
    Fields,
    Format,
    Line,
    answer_text,
    each,
    epoch_seconds,
    first,
    optional_integer,
    optional_text,
)
from trunkattn.analysis.formats.bodies import chat_of, facts_of_response, num_answers_of, prompts_of

TIMES = ("timestamp", "created_at", "created", "start_time", "startTime", "request_time", "arrival_time", "time", "ts")
SESSIONS = ("session_id", "sessionId", "conversation_id", "chat_id", "thread_id", "id")
OUTPUTS = ("output_tokens", "completion_tokens", "num_output_tokens", "output_length", "output_len")
INPUTS = ("prompt_tokens", "input_tokens", "num_prompt_tokens", "input_length", "prompt_len")
ANSWERS = ("response", "answer", "completion", "output", "generated_text")
PROMPTS = ("messages", "prompt", "prompt_token_ids", "input_ids")
CONVERSATIONS = ("conversations", "conversation")
ROLES = (
    ("human", "user"),
    ("gpt", "assistant"),
    ("chatgpt", "assistant"),
    ("bot", "assistant"),
    ("model", "assistant"),
)


def _body(fields: Fields) -> Fields:
    """Where the prompt is: here, or in a request that the object holds."""
    inner = first(fields, "request", "body")
    return inner if isinstance(inner, Mapping) and any(name in inner for name in PROMPTS) else fields


def recognises(fields: Fields) -> bool:
    """Whether an object has a prompt or a conversation under one of the usual names."""
    return any(name in _body(fields) for name in PROMPTS) or isinstance(first(fields, *CONVERSATIONS), list)


def parse(line: Line) -> Iterator[Entry]:
    """The request of a line, or the turns of its conversation."""
    fields = line.fields
    conversation = first(fields, *CONVERSATIONS)
    if isinstance(conversation, list):
        yield from _agent_turns(line, conversation) if _holds_lists(conversation) else _turns(line, conversation)
        return
    body = _body(fields)
    arrival = next((epoch_seconds(name, fields[name]) for name in TIMES if fields.get(name) is not None), None)
    answer = first(fields, *ANSWERS)
    messages = body.get("messages")
    messages = messages if isinstance(messages, list) else []
    ends_with_answer = len(messages) > 1 and _role(messages[-1]) == "assistant"
    if ends_with_answer and answer is None and first(fields, *OUTPUTS) is None:
        if arrival is None:
            yield from _turns(line, messages, body.get("tools"))
            return
        answer, body = messages[-1], {**body, "messages": messages[:-1]}
    prompts = prompts_of(body)
    num_asked = num_answers_of(body, body.get("sampling_params"), fields)
    outcome = facts_of_response(fields if "choices" in fields or "usage" in fields else answer, len(prompts), num_asked)
    num_outputs = optional_integer(fields, *OUTPUTS)
    num_inputs = optional_integer(fields, *INPUTS, least=1)
    for prompt in prompts:
        yield Entry(
            line.number,
            prompt,
            arrival,
            outcome.num_prompt_tokens if num_inputs is None else num_inputs,
            outcome.num_output_tokens if num_outputs is None else num_outputs,
            answer=outcome.answer,
            num_answers=outcome.num_answers or num_asked,
            session=optional_text(fields, *SESSIONS[:-1]),
            turn=optional_integer(fields, "turn"),
            model=optional_text(body, "model") or optional_text(fields, "model"),
        )


def _turns(line: Line, conversation: list[Any], tools: Any = None) -> Iterator[Entry]:
    """A request for each answer of a whole conversation."""
    session = optional_text(line.fields, *SESSIONS) or str(line.number)
    messages: list[Fields] = []
    turn = 0
    for message in conversation:
        role = _role(message)
        text = first(message, "value", "content", "text") if isinstance(message, Mapping) else None
        calls = message.get("tool_calls") if isinstance(message, Mapping) else None
        if role is None or (text is None and not calls):
            raise ValueError("conversations: expected objects with from and value, or role and content")
        message = {"role": role, "content": text} | ({"tool_calls": calls} if calls else {})
        if role == "assistant" and messages:
            answer = answer_text(message)
            yield Entry(line.number, chat_of(list(messages), tools), answer=answer, session=session, turn=turn)
            turn += 1
        messages.append(message)


def _agent_turns(line: Line, conversations: list[list[Any]]) -> Iterator[Entry]:
    """Requests of agents: each conversation is a list of requests."""
    for number, conversation in enumerate(conversations):
        for turn, body in enumerate(conversation):
            if not isinstance(body, Mapping):
                raise ValueError("conversations: expected lists of objects with messages")
            for prompt in prompts_of(body):
                num_inputs = optional_integer(body, *INPUTS, least=1)
                num_outputs = optional_integer(body, *OUTPUTS)
                session = f"{line.number}.{number}"
                yield Entry(line.number, prompt, None, num_inputs, num_outputs, session=session, turn=turn)


def _holds_lists(conversation: list[Any]) -> bool:
    return bool(conversation) and all(isinstance(inner, list) for inner in conversation)


def _role(message: Any) -> str | None:
    role = first(message, "from", "role") if isinstance(message, Mapping) else None
    return dict(ROLES).get(role, role) if isinstance(role, str) else None


FORMAT = Format("chat", "JSON with messages or prompts", recognises, each(parse))
