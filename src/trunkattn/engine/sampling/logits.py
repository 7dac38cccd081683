"""Applies a request's parameters to its logits before the temperature, in vLLM's order, batched over the rows.

A sequence whose parameters change logits has a `LogitsState`. It reads the sequence's own list of tokens, so that a
preemption, which keeps the tokens, changes nothing.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import LogitsProcessor, LogitsProcessorList

from trunkattn.engine.forms.structured_output import GrammarState
from trunkattn.engine.sampling_params import SamplingParams, num_parameters

PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")


@dataclass(frozen=True)
class LogitsRules:
    """What a request's parameters mean for one model. All its answers share it.

    Attributes:
        ends: tokens that end the answer; `min_tokens` holds them back.
        sequences: token sequences that the answer never has. None is empty.
        allowed: `allowed_token_ids`, sorted; empty if all are allowed.
        grammar: the form of the answer, at its beginning; None: any.
        prompt: the distinct tokens of the prompt, sorted, which penalties count; None: each answer finds them.
    """

    ends: tuple[int, ...] = ()
    sequences: tuple[tuple[int, ...], ...] = ()
    allowed: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    grammar: GrammarState | None = None
    prompt: NDArray[np.int64] | None = None

    @cached_property
    def banned_anywhere(self) -> list[int]:
        """Tokens that no answer has anywhere."""
        return [sequence[0] for sequence in self.sequences if len(sequence) == 1]

    @cached_property
    def banned_after(self) -> dict[int, list[tuple[int, ...]]]:
        """Token -> the longer sequences whose last token follows it."""
        found: dict[int, list[tuple[int, ...]]] = {}
        for sequence in self.sequences:
            if len(sequence) > 1:
                found.setdefault(sequence[-2], []).append(sequence)
        return found


class LogitsState:
    """What one sequence's parameters do to its logits, and the counts of its tokens that this needs.

    Args:
        params: the request's parameters.
        rules: what they mean.
        token_ids: prompt and answer; the list grows with the answer.
        num_prompt_tokens: tokens of the prompt.

    Attributes:
        error: why the sequence cannot go on; None if it can.
    """

    def __init__(
        self, params: SamplingParams, rules: LogitsRules, token_ids: list[int], num_prompt_tokens: int
    ) -> None:
        self.params = params
        self.grammar = None if rules.grammar is None else rules.grammar.copy()
        self.error: str | None = None
        self._rules = rules
        self._token_ids = token_ids
        self._num_prompt_tokens = num_prompt_tokens
        self._num_counted = num_prompt_tokens
        self._place: dict[int, int] = {}  # token of the answer -> its place in the next two, which begin as the prompt
        self._prompt = np.unique(token_ids[:num_prompt_tokens]) if rules.prompt is None else rules.prompt
        self._distinct = array("q", self._prompt.tobytes())
        self._occurrences = array("q", bytes(len(self._distinct) * self._distinct.itemsize))

    @property
    def prompt_token_ids(self) -> list[int]:
        return self._token_ids[: self._num_prompt_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        return self._token_ids[self._num_prompt_tokens :]

    @property
    def allowed(self) -> NDArray[np.int64]:
        """`allowed_token_ids`; empty if all are allowed."""
        return self._rules.allowed

    def token_counts(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The distinct tokens of prompt and answer, and how often the answer has each."""
        for token_id in self._token_ids[self._num_counted :]:
            place = self._place.get(token_id)
            if place is None:
                place = self._place[token_id] = self._add(token_id)
            self._occurrences[place] += 1
        self._num_counted = len(self._token_ids)
        return np.array(self._distinct), np.array(self._occurrences)

    def _add(self, token_id: int) -> int:
        """The place of a token that the answer has for the first time."""
        place = int(np.searchsorted(self._prompt, token_id))
        if place < len(self._prompt) and self._prompt[place] == token_id:
            return place
        self._distinct.append(token_id)
        self._occurrences.append(0)
        return len(self._distinct) - 1

    def banned(self) -> list[int]:
        """Tokens that cannot come next: ends of bad words, and before `min_tokens` what ends the answer."""
        num_output_tokens = len(self._token_ids) - self._num_prompt_tokens
        banned = list(self._rules.ends) if num_output_tokens < self.params.min_tokens else []
        banned += self._rules.banned_anywhere
        for *start, last in self._rules.banned_after.get(self._token_ids[-1], ()) if num_output_tokens else ():
            if len(start) <= num_output_tokens and self._token_ids[len(self._token_ids) - len(start) :] == start:
                banned.append(last)
        return banned


def adjust_logits(logits: torch.Tensor, states: Sequence[LogitsState]) -> None:
    """Changes each row as its state says. The order is vLLM's, see `SamplingParams`.

    A row whose processor or grammar fails is filled with NaN, and its state says why.

    Args:
        logits: [len(states), vocab_size] float32, changed in place.
        states: one per row.
    """
    _apply_grammars(logits, states)
    _keep_allowed(logits, states)
    _ban(logits, states)
    _apply_bias(logits, states)
    for row, state in zip(logits, states, strict=True):
        if state.params.logits_processors and state.error is None:
            _process(row, state)
    _penalize(logits, states)


def _places(
    tokens_of_rows: Mapping[int, Sequence[int] | NDArray[np.int64]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Index of single logits: rows and token ids."""
    token_ids = [np.asarray(token_ids, dtype=np.int64) for token_ids in tokens_of_rows.values()]
    rows = np.repeat(np.array(list(tokens_of_rows)), [len(one) for one in token_ids])
    index = torch.from_numpy(np.stack([rows, np.concatenate(token_ids)])).to(device)
    return index[0], index[1]


def _apply_grammars(logits: torch.Tensor, states: Sequence[LogitsState]) -> None:
    masks: dict[int, np.ndarray] = {}
    for row, state in enumerate(states):
        if state.grammar is None:
            continue
        try:
            masks[row] = state.grammar.allowed(state.output_token_ids)
        except ValueError as error:
            state.error = str(error)
            logits[row] = torch.nan
    if masks:
        rows = list(masks)
        allowed = torch.from_numpy(np.stack(list(masks.values()))).to(logits.device)
        logits[rows] = logits[rows].masked_fill_(~allowed, -torch.inf)


def _keep_allowed(logits: torch.Tensor, states: Sequence[LogitsState]) -> None:
    allowed = {row: state.allowed for row, state in enumerate(states) if len(state.allowed)}
    if allowed:
        places = _places(allowed, logits.device)
        kept = logits[places]
        logits[list(allowed)] = -torch.inf
        logits[places] = kept


def _ban(logits: torch.Tensor, states: Sequence[LogitsState]) -> None:
    banned = {row: token_ids for row, state in enumerate(states) if (token_ids := state.banned())}
    if banned:
        logits[_places(banned, logits.device)] = -torch.inf


def _apply_bias(logits: torch.Tensor, states: Sequence[LogitsState]) -> None:
    biases = {row: state.params.logit_bias for row, state in enumerate(states) if state.params.logit_bias}
    if biases:
        values = [value for bias in biases.values() for value in bias.values()]
        places = _places({row: tuple(bias) for row, bias in biases.items()}, logits.device)
        logits[places] += torch.tensor(values, dtype=torch.float32, device=logits.device)


def _penalize(logits: torch.Tensor, states: Sequence[LogitsState]) -> None:
    """The three penalties on the tokens that prompt or answer have; no other logit changes."""
    counts = {row: state.token_counts() for row, state in enumerate(states) if state.params.has_penalties}
    if not counts:
        return
    device = logits.device
    places = _places({row: token_ids for row, (token_ids, _) in counts.items()}, device)
    per_row = [[getattr(states[row].params, name) for name in PENALTIES] for row in counts]
    sizes = torch.tensor([len(token_ids) for token_ids, _ in counts.values()], dtype=torch.int64, device="cpu")
    spread = torch.tensor(per_row, dtype=torch.float32, device="cpu").repeat_interleave(sizes, dim=0)
    repetition, frequency, presence = spread.to(device).unbind(dim=1)
    occurrences = torch.from_numpy(np.concatenate([one for _, one in counts.values()])).to(device, torch.float32)
    values = logits[places]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= frequency * occurrences
    values -= presence * (occurrences > 0)
    logits[places] = values


def _process(row: torch.Tensor, state: LogitsState) -> None:
    """Runs the user's functions on one row. What they raise ends only this sequence."""
    for processor in state.params.logits_processors:
        try:
            result = _call(processor, row, state)
        except Exception as error:  # the function is the user's
            result, state.error = None, f"logits_processors={processor!r} raised {type(error).__name__}: {error}"
        else:
            if not isinstance(result, torch.Tensor) or result.shape != row.shape:
                given = tuple(result.shape) if isinstance(result, torch.Tensor) else result
                state.error = f"logits_processors={processor!r} returned {given!r}: expected logits {tuple(row.shape)}"
        if state.error is not None:
            row.fill_(torch.nan)
            return
        row.copy_(result)


def _call(processor: Any, row: torch.Tensor, state: LogitsState) -> Any:
    if isinstance(processor, LogitsProcessor | LogitsProcessorList):
        token_ids = [[*state.prompt_token_ids, *state.output_token_ids]]
        input_ids: Any = torch.tensor(token_ids, dtype=torch.int64, device=row.device)
        return processor(input_ids, row[None].clone())[0]
    if num_parameters(processor) == 2:
        return processor(state.output_token_ids, row.clone())
    return processor(state.prompt_token_ids, state.output_token_ids, row.clone())
