"""What one step computes: chunks of sequences, page copies, and tokens to sample. No torch here."""

from dataclasses import dataclass, field

from trunkattn.engine.scheduling.request import Request
from trunkattn.kv_cache.page_pool import PageCopy


@dataclass(frozen=True)
class ScheduledChunk:
    """Tokens [start, start + num_tokens) of one sequence, computed in one step."""

    request: Request
    start: int
    num_tokens: int

    @property
    def is_sampled(self) -> bool:
        """Whether the step computes the logits of the sequence's next token."""
        return self.start + self.num_tokens == self.request.num_tokens

    @property
    def prompt_positions(self) -> range:
        """Positions of the prompt whose logits the step needs, for log-probabilities of the tokens after them."""
        if not self.request.needs_prompt_logits:
            return range(0)
        end = min(self.start + self.num_tokens, self.request.num_prompt_tokens - 1)
        return range(max(self.start, self.request.num_prompt_logprobs), end)


@dataclass(frozen=True)
class Sample:
    """One token to sample for `request` from logits row `row`. A new sequence forks from `parent`."""

    request: Request
    row: int
    parent: Request | None = None


@dataclass(frozen=True)
class ScheduledBatch:
    """What one step computes.

    Attributes:
        chunks: one per sequence, oldest arrival first.
        copies: page copies (copy-on-write) to carry out before any KV is written.
        samples: tokens to sample; row r of the logits belongs to the r-th chunk that `is_sampled`. After these rows
            come those of the chunks' `prompt_positions`.
    """

    chunks: list[ScheduledChunk] = field(default_factory=list)
    copies: list[PageCopy] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
