"""How one request is sampled: `SamplingParams`, which checks itself. No torch here."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from trunkattn.validate import check_bool, check_int, check_real, check_text, keep_int, written

MAX_REPETITION_PENALTY = 1e4  # and its inverse: a logit that is scaled by more may overflow
MAX_LOGIT_BIAS = 1e4  # a softmax cannot tell it from infinity
MAX_TOP_K = 2**31 - 1
MAX_ANSWERS = 1 << 14  # of a prompt; each has a record from the start
GREEDY_BELOW = 1e-5  # a smaller temperature counts as 0: its softmax is one-hot in float32


@dataclass(frozen=True)
class StructuredOutputsParams:
    """A form that an answer must have. Exactly one is given. The names are vLLM's.

    The size of a form is limited, but not the time and the memory that llguidance takes to compile it: some small
    schemas, such as `{"multipleOf": 12345677}`, take minutes and gigabytes. `LLM` compiles a form in its own process,
    and Ctrl-C ends the wait. Let `trunkattn serve` answer forms of people whom you do not trust: it tries each one in
    another process with limits.

    Attributes:
        json: a JSON schema, as a mapping or as text.
        regex: a regular expression that the whole answer matches.
        choice: the answers to choose from.
        grammar: a context-free grammar in llguidance's Lark syntax, with the rule `start`.
        json_object: True: any JSON object.

    Raises:
        TypeError, ValueError: naming the form, its value and what is expected. The engine checks what a form says when
            the request arrives.

    Example:
        >>> StructuredOutputsParams(choice=["yes", "no"]).choice
        ('yes', 'no')
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Iterable[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        given = [form.name for form in fields(self) if getattr(self, form.name) not in (None, False)]
        if len(given) != 1:
            names = ", ".join(form.name for form in fields(self))
            raise ValueError(f"structured_outputs={given!r}: expected exactly one of {names}; leave the others out")
        if self.json is not None and not isinstance(self.json, str | Mapping):
            raise TypeError(f"json={self.json!r}: expected a JSON schema, as a mapping or as text")
        for name in ("regex", "grammar"):
            text = getattr(self, name)
            if text is not None and (not isinstance(text, str) or not text):
                raise TypeError(f"{name}={text!r}: expected a text that is not empty")
            check_text(name, text or "")
        if self.choice is not None:
            object.__setattr__(self, "choice", _strings("choice", self.choice))
        if self.json_object is not None:
            check_bool("json_object", self.json_object)


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled. The names and defaults are vLLM's.

    The logits of a token pass, in this order: `structured_outputs`, `allowed_token_ids`, `bad_words`, `min_tokens`,
    `logit_bias`, `logits_processors`, the three penalties, `temperature`, `min_p`, `top_k`, `top_p`.

    Attributes:
        n: number of answers, at most 16,384. The prompt is computed once for all of them.
        temperature: the logits are divided by it, at least 0. Below 1e-5 the most likely token is taken (greedy).
        top_p: keep the fewest most likely tokens whose probabilities sum to at least top_p, 0 < top_p <= 1.
        top_k: keep the top_k most likely tokens; 0 or -1 keeps all. Applied before top_p.
        seed: an integer of 64 bits. The same seed gives the same answers in any batch; answer i has its own random
            stream, (seed, i). None or -1: another one each time.
        stop: a string or several that end the answer. The text ends before the string.
        stop_token_ids: token ids that end the answer. They stay in `token_ids` and are not in the text.
        max_tokens: most tokens of an answer; None: up to the engine's `max_model_len`.
        ignore_eos: continue after the end-of-sequence token.
        logprobs: report the natural-log probabilities of this many most likely tokens and of the sampled one, from the
            unmodified logits; None: report none.
        repetition_penalty: from 0.0001 to 10,000. A logit of a token that the prompt or the answer has is divided by it
            if it is positive and multiplied by it if not (https://arxiv.org/abs/1909.05858, §4.1).
        presence_penalty: from -2 to 2, subtracted from the logit of each token that the answer has.
        frequency_penalty: from -2 to 2, subtracted as many times as the answer has the token.
        min_p: drop tokens less likely than min_p times the most likely one, 0 <= min_p <= 1.
        min_tokens: before this many tokens no end-of-sequence token, stop token or stop string ends the answer.
        logit_bias: token id -> number from -10,000 to 10,000 that is added to its logit.
        bad_words: texts that the answer never has, with and without a space before them. Each is banned as the tokens
            that the tokenizer makes of it.
        allowed_token_ids: the only tokens that the answer may have; None: all.
        logits_processors: callables that change the logits [vocab_size] float32 of one answer:
            f(output_token_ids, logits), f(prompt_token_ids, output_token_ids, logits), with token ids in lists, or a
            transformers `LogitsProcessor`, which gets input ids [1, tokens] and scores [1, vocab_size]. They return
            the logits and may change them in place.
        prompt_logprobs: like `logprobs` for each token of the prompt; the prompt is then computed whole, without the
            prefix cache.
        truncate_prompt_tokens: keep only this many last tokens of the prompt; -1: as many as the engine accepts.
        skip_special_tokens: leave special tokens out of the text.
        kept_special_token_ids: special tokens that the text has even so, such as marks of tool calls.
        spaces_between_special_tokens: False asks the tokenizer to put no spaces between special tokens in the text.
        include_stop_str_in_output: the text ends after the stop string or stop token, not before it.
        detokenize: False: no text is made, only token ids.
        structured_outputs: a form that the answer must have, such as a JSON schema.

    Raises:
        TypeError, ValueError: naming the parameter, its value and what is expected.

    Example:
        >>> SamplingParams(n=2, temperature=0.8, seed=1, stop="END").stop_strings
        ('END',)
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: str | Iterable[str] = ()
    stop_token_ids: Iterable[int] = ()
    max_tokens: int | None = 16
    ignore_eos: bool = False
    logprobs: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_p: float = 0.0
    min_tokens: int = 0
    logit_bias: Mapping[int, float] | None = None
    bad_words: Iterable[str] = ()
    allowed_token_ids: Iterable[int] | None = None
    logits_processors: Iterable[Callable[..., Any]] = ()
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    skip_special_tokens: bool = True
    kept_special_token_ids: Iterable[int] = ()
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    detokenize: bool = True
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_counts()
        for name in ("ignore_eos", "skip_special_tokens", "spaces_between_special_tokens"):
            check_bool(name, getattr(self, name))
        for name in ("include_stop_str_in_output", "detokenize"):
            check_bool(name, getattr(self, name))
        form = self.structured_outputs
        if form is not None and not isinstance(form, StructuredOutputsParams):
            raise TypeError(f"structured_outputs={form!r}: expected StructuredOutputsParams")
        normalised = {
            "stop": _strings("stop", self.stop),
            "stop_token_ids": _token_ids("stop_token_ids", self.stop_token_ids),
            "kept_special_token_ids": _token_ids("kept_special_token_ids", self.kept_special_token_ids),
            "logit_bias": _logit_bias(self.logit_bias),
            "bad_words": _strings("bad_words", self.bad_words),
            "logits_processors": _processors(self.logits_processors),
        }
        if self.allowed_token_ids is not None:
            normalised["allowed_token_ids"] = _token_ids("allowed_token_ids", self.allowed_token_ids)
            if not normalised["allowed_token_ids"]:
                raise ValueError(f"allowed_token_ids={self.allowed_token_ids!r}: expected at least one token id")
        for name, value in normalised.items():
            object.__setattr__(self, name, value)
        if self.stop_strings and not self.detokenize:
            raise ValueError(
                f"stop={self.stop!r}: expected no stop strings with detokenize=False, because there is no text to find "
                f"them in; use stop_token_ids"
            )

    def _check_numbers(self) -> None:
        if check_real("temperature", self.temperature, "a finite number >= 0") < 0:
            raise ValueError(f"temperature={self.temperature!r}: expected a finite number >= 0")
        if not 0 < check_real("top_p", self.top_p, "a number in (0, 1]") <= 1:
            raise ValueError(f"top_p={self.top_p!r}: expected a number in (0, 1]")
        if not 0 <= check_real("min_p", self.min_p, "a number in [0, 1]") <= 1:
            raise ValueError(f"min_p={self.min_p!r}: expected a number in [0, 1]")
        if check_real("repetition_penalty", self.repetition_penalty, "a finite number above 0") <= 0:
            raise ValueError(f"repetition_penalty={self.repetition_penalty!r}: expected a finite number above 0")
        if not 1 / MAX_REPETITION_PENALTY <= self.repetition_penalty <= MAX_REPETITION_PENALTY:
            raise ValueError(f"repetition_penalty={self.repetition_penalty!r}: expected a number from 0.0001 to 10000")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            if not -2 <= check_real(name, value, "a number from -2 to 2") <= 2:
                raise ValueError(f"{name}={value!r}: expected a number from -2 to 2")
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            object.__setattr__(self, name, float(getattr(self, name)))  # torch takes no large integer as a number

    def _check_counts(self) -> None:
        keep_int(self, "n", 1, MAX_ANSWERS)
        keep_int(self, "top_k", -1, MAX_TOP_K)
        keep_int(self, "min_tokens", 0)
        for name, least in (("max_tokens", 1), ("logprobs", 0), ("prompt_logprobs", 0)):
            if getattr(self, name) is not None:
                keep_int(self, name, least)
        if self.seed == -1 and not isinstance(self.seed, bool):
            object.__setattr__(self, "seed", None)
        if self.seed is not None:
            keep_int(self, "seed", -(2**63), 2**63 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={written(self.min_tokens)}: expected at most max_tokens={self.max_tokens}")
        if self.truncate_prompt_tokens is not None:
            keep_int(self, "truncate_prompt_tokens", -1)
        if self.truncate_prompt_tokens == 0:
            raise ValueError("truncate_prompt_tokens=0: expected at least 1, or -1 for as many as the engine accepts")

    @property
    def is_greedy(self) -> bool:
        """Whether each token is simply the most likely one."""
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        """Whether a logit depends on the tokens so far through one of the three penalties."""
        penalties = self.repetition_penalty, self.presence_penalty, self.frequency_penalty
        return penalties != (1.0, 0.0, 0.0)

    @property
    def changes_logits(self) -> bool:
        """Whether anything changes the logits before the temperature."""
        return bool(
            self.has_penalties
            or self.min_tokens
            or self.logit_bias
            or self.bad_words
            or self.allowed_token_ids
            or self.logits_processors
            or self.structured_outputs
        )

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return tuple(self.stop)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """`stop_token_ids` as a tuple."""
        return tuple(self.stop_token_ids)


def default_sampling_params(generation_config: object) -> SamplingParams:
    """The parameters that a model's generation_config.json sets, as far as vLLM reads it, and defaults for the rest.

    Raises:
        TypeError, ValueError: the file has a bad value; the message names it.
    """
    same = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    named = [*((name, name) for name in same), ("max_new_tokens", "max_tokens")]
    found = {to: getattr(generation_config, name, None) for name, to in named}
    return SamplingParams(**{name: value for name, value in found.items() if value is not None})


def _strings(name: str, value: object) -> tuple[str, ...]:
    expected = "a list of strings" if name != "stop" else "a string or a list of strings"
    strings = (value,) if isinstance(value, str) and name == "stop" else value
    if strings is None:
        return ()
    if isinstance(strings, str | bytes) or not isinstance(strings, Iterable):
        raise TypeError(f"{name}={value!r}: expected {expected}")
    strings = tuple(strings)
    for string in strings:
        if not isinstance(string, str):
            raise TypeError(f"{name}={value!r}: expected {expected}")
        if not string.strip() if name == "bad_words" else not string:
            raise ValueError(f"{name}={string!r}: expected a text that is not empty")
        check_text(name, string)
    if name == "choice" and not strings:
        raise ValueError(f"{name}={value!r}: expected at least one string")
    return strings


def _token_ids(name: str, token_ids: object) -> tuple[int, ...]:
    if token_ids is None:
        return ()
    if isinstance(token_ids, str | bytes) or not isinstance(token_ids, Iterable):
        raise TypeError(f"{name}={token_ids!r}: expected a list of token ids")
    return tuple(check_int(name, token_id, 0) for token_id in token_ids)


def _logit_bias(bias: object) -> dict[int, float] | None:
    if bias is None:
        return None
    if not isinstance(bias, Mapping):
        raise TypeError(f"logit_bias={bias!r}: expected a mapping from token ids to numbers")
    checked = {}
    for token_id, value in bias.items():
        expected = f"a number from {-MAX_LOGIT_BIAS:.0f} to {MAX_LOGIT_BIAS:.0f}"
        number = check_real(f"logit_bias[{token_id}]", value, expected)
        if abs(number) > MAX_LOGIT_BIAS:
            raise ValueError(f"logit_bias[{token_id}]={value!r}: expected {expected}")
        checked[check_int("logit_bias: token id", token_id, 0)] = number
    return checked


def _processors(processors: object) -> tuple[Callable[..., Any], ...]:
    expected = "a list of callables with 2 or 3 parameters, see SamplingParams.logits_processors"
    if processors is None:
        return ()
    if isinstance(processors, str | bytes) or not isinstance(processors, Iterable):
        raise TypeError(f"logits_processors={processors!r}: expected {expected}")
    processors = tuple(processors)
    if not all(callable(processor) and num_parameters(processor) in (2, 3) for processor in processors):
        raise TypeError(f"logits_processors={processors!r}: expected {expected}")
    return processors


def num_parameters(function: Callable[..., Any]) -> int:
    """Positional parameters that a call has to give; -1 for a function in C that does not say."""
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return -1
    return sum(one.kind in kinds and one.default is inspect.Parameter.empty for one in parameters)
