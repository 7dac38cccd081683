"""Tokens of requests, as responses and events tell them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trunkattn.engine.outputs import RequestOutput
from trunkattn.server.bodies.protocol import StreamOptions


@dataclass(frozen=True)
class Usage:
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def as_json(self) -> dict[str, Any]:
        """The counts as OpenAI's API shapes them."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


def usage_of(outputs: Sequence[RequestOutput]) -> Usage:
    """Tokens of a request's prompts and answers."""
    return Usage(
        sum(len(output.prompt_token_ids) for output in outputs),
        sum(len(answer.token_ids) for output in outputs for answer in output.outputs),
        sum(output.num_cached_tokens for output in outputs),
    )


def usage_so_far(outputs: Sequence[RequestOutput], options: StreamOptions) -> dict[str, Any]:
    """The field `usage` of an event before the last one, if it has one: null, unless every event is to have the counts.

    Args:
        outputs: the newest output of each prompt of the request that has one.
        options: what the request asks for.
    """
    if options.continuous_usage_stats:
        return {"usage": usage_of(outputs).as_json()}
    return {"usage": None} if options.include_usage else {}
