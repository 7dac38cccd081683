"""The limits of a request: every list, text, depth and number that a client sends has one here, and nowhere else.

Where OpenAI's API documents a value, it stands beside ours, which is never lower than clients in use need.
"""

from dataclasses import dataclass, field
from typing import Final

from trunkattn.engine.forms.limits import FormLimits


@dataclass(frozen=True)
class RequestLimits:
    """What one request may hold. `ServerOptions` has the limits that an operator sets.

    Attributes:
        values: commas of a body, those of its texts among them, before it is read as JSON.
        nodes: texts, names, lists, mappings and fractions of a body, and values of one whose values are no token ids.
        chunks: chunks of fewer than chunk_bytes bytes, of a body that comes in chunks. Most clients send 8 KiB or more.
        digits: digits of a number in a row. Those of the largest float are 309.
        unknown: names of a body that do not exist.
        depth: levels of lists and mappings in a field of any JSON (OpenAI: 10 in a schema).
        prompts: prompts of a request; an operator sets a lower limit of its answers.
        messages: messages of a conversation (OpenAI: 2,048). parts: parts of a message.
        tools: tools of a request (OpenAI: 128). tool_calls: calls of a message.
        name: characters of a tool's, role's or schema's name (OpenAI: 64).
        modalities: kinds of answers that a request names.
        label: characters of a model, user, salt or id (OpenAI: 512 for a value of metadata).
        stop: strings that end an answer (OpenAI: 4; evaluation tools send more). stop_characters: characters of each.
        logprobs: most likely tokens that are reported for a place (OpenAI: 20 in a chat, 5 in completions).
        logprob_entries: log-probabilities of all places of a request's prompts and answers, and of all requests at a
            time.
        temperature: the highest (OpenAI: 2).
        bias: the highest number in `logit_bias`, and below zero the lowest (OpenAI: 100). biases: their number.
        bad_words: texts that an answer never has. word: characters of each.
        stop_token_ids, allowed_token_ids: their numbers.
        top_k: the highest.
        template_seconds: processor time for the model's chat template.
        form_seconds: processor time for compiling a form of answers. form_token_seconds: for a token of it, and for
            the slowest tokens of all answers at a time, as two answers that are tried show them.
        form_bytes: address space of a process that tries forms.
        forms: see `FormLimits`.
        bodies: bytes of all bodies over 64 KiB that are being read or answered at a time.
        live_pages: open live pages of a tenant.
        header_seconds: time for the head of a request to arrive, from the start of a connection or from its first byte.
        body_seconds: time for a body to arrive.
        write_seconds: time that a client may leave a full connection unread.
    """

    values: int = 1_000_000
    nodes: int = 50_000
    chunks: int = 1_000
    chunk_bytes: int = 512
    digits: int = 512
    unknown: int = 64
    depth: int = 64
    prompts: int = 2_048
    messages: int = 2_048
    parts: int = 2_048
    tools: int = 128
    tool_calls: int = 128
    name: int = 64
    modalities: int = 8
    label: int = 512
    stop: int = 16
    stop_characters: int = 256
    logprobs: int = 20
    logprob_entries: int = 2_000_000
    temperature: float = 2.0
    bias: float = 100.0
    biases: int = 1_024
    bad_words: int = 256
    word: int = 256
    stop_token_ids: int = 256
    allowed_token_ids: int = 4_096
    top_k: int = 1 << 20
    template_seconds: float = 2.0
    form_seconds: float = 2.0
    form_token_seconds: float = 0.2
    form_bytes: int = 4 << 30
    forms: FormLimits = field(default_factory=FormLimits)
    bodies: int = 256 << 20
    live_pages: int = 16
    header_seconds: float = 10.0
    body_seconds: float = 60.0
    write_seconds: float = 60.0


LIMITS: Final = RequestLimits()
