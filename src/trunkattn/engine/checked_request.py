"""A request that can run: checked against one model, with everything done that takes time."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from trunkattn.engine.sampling.logits import LogitsRules
from trunkattn.engine.sampling_params import SamplingParams
from trunkattn.engine.scheduling.request import PromptTooLong
from trunkattn.engine.token_rules import ModelLimits, TokenRules
from trunkattn.validate import check_int, written


@dataclass(frozen=True)
class CheckedRequest:
    """A request that can run: its prompt, truncated if it asks for that, and what its parameters mean.

    Attributes:
        has_answer: False: it ends when its prompt is computed, and gets no token.
    """

    token_ids: list[int]
    params: SamplingParams
    rules: LogitsRules
    has_answer: bool = True


class RequestChecks:
    """Checks requests against one model. Any thread may use it.

    Args:
        limits: the model's.
        token_rules: what parameters mean for the model.
    """

    def __init__(self, limits: ModelLimits, token_rules: TokenRules) -> None:
        self._limits, self._token_rules = limits, token_rules

    def check(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, name: str, rules: LogitsRules | None
    ) -> CheckedRequest:
        """The request as `Engine.check_request` describes it."""
        limit = self._limits.max_model_len - 1
        rules = rules or self._token_rules.check(params)
        kept = self._token_rules.truncate(prompt_token_ids, params)
        if len(kept) == 0:
            raise ValueError(f"{name} has 0 tokens: expected at least one, which the answer follows")
        if len(kept) > limit:
            raise PromptTooLong(
                f"{name} has {len(kept)} tokens: expected 1 to {limit}, because this model's maximum context length is "
                f"{limit + 1} tokens here, by its configuration, the option max_model_len or the KV cache; shorten the "
                f"prompt, or raise the lowest of the three"
            )
        if params.min_tokens > (room := limit + 1 - len(kept)):
            raise ValueError(
                f"min_tokens={written(params.min_tokens)}: expected at most {room}, because {name} has {len(kept)} "
                f"tokens and this model's maximum context length is {limit + 1} tokens here"
            )
        highest = self._limits.vocab_size - 1
        if not all(type(token_id) is int and 0 <= token_id <= highest for token_id in prompt_token_ids):
            for token_id in prompt_token_ids:  # one is bad or an integer of another type, which check_int accepts
                check_int(f"{name}: token id", token_id, 0, highest)
        token_ids = [int(token_id) for token_id in kept]
        if params.has_penalties:
            rules = replace(rules, prompt=np.unique(np.array(token_ids, dtype=np.int64)))
        return CheckedRequest(token_ids, params, rules)
