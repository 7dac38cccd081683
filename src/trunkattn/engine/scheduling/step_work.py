"""The work of a step: its tokens, and their attention to earlier tokens, in one integer unit. No torch here."""

from math import isqrt
from typing import NamedTuple

PROMPT_SHARE = 4  # prompts get at least 1/4 of a step's work, however much the running answers take
LEAST_SHARE = 16  # a step may take at least 1/16 of the work of a full one, however slow the machine is
MOST_GROWTH, MOST_SHRINKAGE = 2, 2  # of the work that a step may take, from one step to the next


class WorkPrices(NamedTuple):
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
    def of_keys(cls, keys_per_token: int | None) -> "WorkPrices":
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


class StepPace:
    """How much work a step may take.

    How long work takes depends on the machine, and on what else runs there. With a bound for the time of a step, the
    work of the next one follows the steps that were timed. Without a bound a step may always take all of `most`.

    Args:
        most: the most work of a step.
        seconds: the time that a step should take at most; None: any.

    Example:
        >>> pace = StepPace(1600, seconds=0.2)
        >>> pace.work
        100
        >>> pace.timed(100, 0.01)  # there is time for more
        >>> pace.work, pace.has_room(150), pace.has_room(151)
        (200, True, False)
    """

    def __init__(self, most: int, seconds: float | None = None) -> None:
        self._most, self._seconds = most, seconds
        self._fitting = self._least  # into the time; answers to long prompts may have more than `most`

    @property
    def work(self) -> int:
        """The most work of the next step."""
        return self._most if self._seconds is None else min(self._most, self._fitting)

    def has_room(self, work: int) -> bool:
        """Whether one more answer may run, beside prompts. work: what the next tokens of the answers that run take."""
        return self._seconds is None or work * PROMPT_SHARE <= self._fitting * (PROMPT_SHARE - 1)

    @property
    def _least(self) -> int:
        return max(1, self._most // LEAST_SHARE)

    def timed(self, work: int, seconds: float) -> None:
        """Takes note of a step: its work, and the time that it took."""
        if self._seconds is None:
            return
        fitting = int(work * self._seconds / max(seconds, 1e-9))
        if seconds > self._seconds:
            self._fitting = max(self._least, min(self._fitting, max(fitting, self.work // MOST_SHRINKAGE)))
        elif fitting > self._fitting:  # a shorter step with less work says nothing about more
            self._fitting = min(fitting, self._fitting * MOST_GROWTH)


class StepBudget:
    """What a step may still take.

    Args:
        prices: what its tokens cost.
        tokens: most tokens.
        work: most work; None: what `tokens` tokens take at the beginning of a prompt.

    Attributes:
        tokens, work: what is left.
    """

    def __init__(self, prices: WorkPrices, tokens: int, work: int | None = None) -> None:
        self.prices, self.tokens = prices, tokens
        self.work = prices.of(0, tokens) if work is None else work

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
