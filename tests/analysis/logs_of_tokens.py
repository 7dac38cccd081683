"""Logs made from prompts whose tokens are known, so that a replay can be held against what really runs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from trunkattn.analysis.records import LoggedRequest


@dataclass
class Numbering:
    """Numbers for blocks of tokens: equal ones for equal blocks after equal blocks."""

    block_size: int
    known: dict[tuple[int, tuple[int, ...]], int] = field(default_factory=dict)
    numbers: count = field(default_factory=count)

    def blocks(self, tokens: Sequence[int]) -> np.ndarray:
        numbers, before = [], -1
        for start in range(0, len(tokens), self.block_size):
            key = before, tuple(tokens[start : start + self.block_size])
            before = self.known.setdefault(key, len(self.known))
            numbers.append(before)
        return np.array(numbers, np.int64)


@dataclass(frozen=True)
class Prompt:
    """A request whose tokens are known. step: before which it is added."""

    tokens: list[int]
    answers: list[list[int]]
    step: int = 0
    session: str | None = None
    turn: int = 0

    def logged(self, line: int, numbering: Numbering) -> LoggedRequest:
        return LoggedRequest(
            line=line,
            arrival=float(self.step),
            num_prompt_tokens=len(self.tokens),
            num_output_tokens=len(self.answers[0]),
            blocks=numbering.blocks(self.tokens),
            block_size=numbering.block_size,
            num_answers=len(self.answers),
            session=self.session,
            turn=self.turn,
        )


def random_prompts(rng: np.random.Generator, number: int, block_size: int, vocabulary: int, most: int) -> list[Prompt]:
    """Prompts that share whole blocks at random, some in sessions of turns, some with several answers.

    A block that no other prompt has begins with a token that no block after the same blocks begins with.
    """
    trunks: list[list[int]] = [[]]
    taken: dict[tuple[int, ...], set[int]] = {}

    def new_tokens(before: Sequence[int], length: int) -> list[int]:
        tokens = rng.integers(0, vocabulary, length).tolist()
        used = taken.setdefault(tuple(before), set())
        tokens[0] = next(each for each in rng.permutation(vocabulary).tolist() if each not in used)
        used.add(tokens[0])
        return tokens

    def answer(before: Sequence[int], length: int) -> list[int]:
        return new_tokens(before, length)

    for _ in range(6):
        parent = trunks[rng.integers(len(trunks))]
        if len(parent) < most // 2:
            trunks.append(parent + new_tokens(parent, block_size))
    prompts: list[Prompt] = []
    step = 0
    while len(prompts) < number:
        step += int(rng.integers(0, 6))
        trunk = trunks[rng.integers(len(trunks))]
        tokens = trunk + new_tokens(trunk, int(rng.integers(1, 3 * block_size)))
        length, num_answers = int(rng.integers(1, 24)), int(rng.choice([1, 1, 1, 3]))
        name = f"session {len(prompts)}" if rng.random() < 0.4 and num_answers == 1 else None
        prompts.append(Prompt(tokens, [answer(tokens, length) for _ in range(num_answers)], step, name))
        turn = 0
        while name is not None and rng.random() < 0.6 and len(tokens) < most:
            turn, step = turn + 1, step + int(rng.integers(20, 60))
            tokens = tokens + prompts[-1].answers[0]
            tokens = tokens + new_tokens(tokens, int(rng.integers(1, 2 * block_size)))
            prompts.append(Prompt(tokens, [answer(tokens, int(rng.integers(1, 24)))], step, name, turn))
    return prompts
