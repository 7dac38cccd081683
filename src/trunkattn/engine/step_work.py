"""The work of a step: its tokens, and their attention to earlier tokens, in one integer unit. No torch here."""

from math import isqrt
from typing import NamedTuple

PROMPT_SHARE = 4  # prompts get at least 1/4 of a step's work, however much the running answers take


class StepWork(NamedTuple):
    """Prices of what a step computes.

    A token late in a long sequence takes many times as long as an early one, because it attends to every token before
    it. If the budget only counted tokens, steps would take longer for longer prompts.

    Attributes:
        token: price of a token in everything but attention.
        key: price of its attention to one token, 0 or 1.
    """

    token: int = 1
    key: int = 0

    @classmethod
    def of_keys(cls, keys_per_token: int | None) -> "StepWork":
        """Prices of a model. keys_per_token: how many keys a token attends to in the time that the rest of the model
        takes for it; None: attention costs nothing."""
        return cls() if keys_per_token is None else cls(keys_per_token, 1)

    def of(self, start: int, num_tokens: int) -> int:
        """Work of tokens [start, start + num_tokens) of a sequence."""
        return num_tokens * (self.token + self.key * start) + self.key * (num_tokens * (num_tokens + 1) // 2)

    def most_tokens(self, start: int, work: int) -> int:
        """The most tokens from `start` on whose work is at most `work`."""
        if work <= 0 or not self.key:
            return max(0, work) // self.token
        slope = 2 * (self.token + start) + 1  # of n: twice the work of n tokens is n² + slope · n
        return (isqrt(slope * slope + 8 * work) - slope) // 2


class StepBudget:
    """What a step may still take.

    Args:
        prices: of its tokens.
        tokens: most tokens. Its work is what so many take at the beginning of a prompt.

    Attributes:
        tokens, work: what is left.
    """

    def __init__(self, prices: StepWork, tokens: int) -> None:
        self.prices, self.tokens, self.work = prices, tokens, prices.of(0, tokens)

    def reserve(self, work: int) -> None:
        """Takes the work of running sequences, but leaves a part of the whole for prompts."""
        self.work = max(self.work - work, self.work // PROMPT_SHARE)

    def take(self, start: int, num_tokens: int) -> None:
        """Takes tokens [start, start + num_tokens) of a sequence."""
        self.tokens -= num_tokens
        self.work -= self.prices.of(start, num_tokens)

    @property
    def is_spent(self) -> bool:
        """Whether nothing more can start."""
        return self.tokens <= 0 or self.work <= 0
