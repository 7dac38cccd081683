"""Why the portable kernels compute an attention on a card, in words for `PlanStats.reason` and `trunkattn doctor`."""

from typing import Final, NamedTuple

from trunkattn.config import AttentionConfig
from trunkattn.gpu.tuning.cards import Card

_HOPPER: Final = 90  # compute capability of the cards that have kernels of their own


class WhyPortable(NamedTuple):
    """Reasons; empty: the fast kernel computes it. prompts: of prompt chunks."""

    decodes: tuple[str, ...]
    prompts: tuple[str, ...]


def why_portable(config: AttentionConfig, card: Card, capability: int) -> WhyPortable:
    """The reasons for an attention on a card of a compute capability, such as 90 for 9.0."""
    if capability != _HOPPER:
        reason = (f"compute capability {capability // 10}.{capability % 10}: the fast kernels are for 9.0",)
        return WhyPortable(reason, reason)
    decodes, prompts = card.why_portable_decodes(config), card.why_portable_prompts(config)
    if config.execution == "streams":  # for comparisons: PAT's launches side by side
        decodes.append("execution='streams': expected 'auto', 'serial' or 'overlapped'")
    if config.batch_invariant:  # all are rows of tiles
        prompts = decodes
    return WhyPortable(tuple(decodes), tuple(prompts))


def told(reasons: tuple[str, ...]) -> str:
    """What a plan's reason ends with."""
    return f"; portable kernel: {', '.join(reasons)}" if reasons else ""
