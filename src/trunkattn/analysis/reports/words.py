"""What an analysis says in sentences: its verdict, and what it assumes."""

from collections.abc import Sequence
from typing import Final

import trunkattn.analysis.figures as figures
from trunkattn.analysis.pricing.prices import Prices
from trunkattn.analysis.records import FleetReplay, Log, Replay, Spoiler
from trunkattn.analysis.simulation.engine import EngineSize
from trunkattn.analysis.simulation.load import Workload

_WORTH: Final = 0.02  # smaller gains in time per token count as none
_NO_READS: Final = 0.005  # smaller savings of KV reads count as none
_OVERLOADED_S: Final = 30.0  # mean seconds to the first token from which an engine counts as overloaded


def verdict(replays: Sequence[Replay]) -> str:
    """What sharing is worth in the first replay, and in the one where it is worth most, in one sentence."""
    first = replays[0]
    gain = figures.time_saved(first)
    name = "" if figures.is_closed(first) else f" ({first.name})"
    text = f"At {_at_a_time(first)} at a time{name} reading shared prefixes once "
    if figures.reads_saved(first) < _NO_READS:
        text += "saves nothing, because requests that decode together share nothing"
        if abs(gain) >= _WORTH:
            more = "shorter" if gain > 0 else "longer"
            text += (
                f"; the time per token is still {figures.percent(abs(gain))} {more}, by this library's kernels alone"
            )
    elif gain < -_WORTH:
        text += f"costs {figures.percent(-gain)} of the time per token"
    elif gain < _WORTH:
        text += f"gains {figures.percent(abs(gain))}, which is nothing"
    else:
        before, after = figures.milliseconds(first.tpot_ms), figures.milliseconds(first.shared_tpot_ms)
        text += f"takes {figures.percent(gain)} off the time per token, {after} instead of {before}"
    best = max(replays, key=lambda replay: (figures.reads_saved(replay) >= _NO_READS, figures.time_saved(replay)))
    if figures.time_saved(best) > gain + _WORTH and figures.reads_saved(best) >= _NO_READS:
        text += f"; at {_at_a_time(best)} at a time it would take {figures.percent(figures.time_saved(best))} off"
    return f"{text}."


def overload(replay: Replay) -> list[str]:
    """A sentence that says that an engine does not keep up with the requests; none if it does."""
    if replay.shared_ttft_ms < 1e3 * _OVERLOADED_S:
        return []
    wait = figures.seconds(replay.shared_ttft_ms / 1e3)
    return [f"One engine does not keep up with these requests ({replay.name}): they wait {wait} on average."]


def _at_a_time(replay: Replay) -> str:
    """Mean number of sequences that decode, for people."""
    mean = figures.count(figures.mean_decoding(replay.moments))
    return f"{mean} request" + ("" if mean == "1" else "s")


def assumptions(log: Log, prices: Prices, size: EngineSize, whole: Workload, num_first: int) -> list[str]:
    """What an analysis assumes, one sentence each. num_first: requests of the replays besides the first."""
    cards = f"{prices.tensor_parallel} x " if prices.tensor_parallel > 1 else ""
    said = [
        *log.assumptions,
        f"{prices.shape.name} runs on {cards}{prices.card.model.name} with a KV cache of {size.num_pages:,} pages of "
        f"{size.page_size} tokens, at most {size.max_num_seqs} sequences at once where requests come by time, and "
        f"{size.max_num_batched_tokens:,} tokens a step ({size.scheduler_policy}).",
        _one_by_one(prices),
        *rates(prices),
        "Requests that come by time are replayed twice, since an engine that is slower has more of them at once; in a "
        "closed loop both run the same steps.",
        "A step takes what kernels take: times of HTTP, tokenizers and other programs are not in it.",
    ]
    if set(prices.shape.windows) != {None}:
        said.append(
            "Layers with a sliding window read what they see; pictures of prefix trees show the KV of all tokens."
        )
    if whole.num_guessed:
        requests = figures.plural(whole.num_guessed, "request")
        said.append(f"The log names no answer length for {requests}: a set number of tokens is generated.")
    if whole.num_left_out:
        requests = figures.plural(whole.num_left_out, "request")
        said.append(
            f"The engine is too small for {requests}, so the replays have none of that kind: an answer has to fit in "
            f"the KV cache, and all answers to a prompt in {size.max_num_seqs} sequences."
        )
    if num_first < len(whole.requests):
        said.append(f"Replays after the first one take the first {num_first:,} requests.")
    if whole.source.knows_answers:
        said.append("A turn of a session begins with the prompt and the answer before it, and comes after that answer.")
    return said


def _one_by_one(prices: Prices) -> str:
    """What computes attention one by one."""
    if prices.shape.latent_dim is not None:
        return "One by one is this library's kernel without sharing; all else of a step is the same in both."
    return (
        "One by one is FlashAttention, which reads a shared page once from memory and again from the L2 cache; shared "
        "is this library's attention; all else of a step is the same in both."
    )


def rates(prices: Prices) -> list[str]:
    """One sentence for each rate of the attention that no engine on the card confirms: how far to trust it."""
    if prices.shape.latent_dim is None:
        return []
    said = [
        "The rates of a latent cache come from a model of its kernel that is fitted to no engine on the card: take "
        "ratios as estimates, and times as rough ones."
    ]
    kernel = prices.decode_kernel
    if kernel.portable:
        said.append(
            f"The {kernel.name} kernel computes it and was not timed. It is priced like the one for H100 and H200, "
            "which is faster, so its times are too low."
        )
    return said


def beside(spoilers: Sequence[Spoiler], num_replayed: int, fleet: Sequence[FleetReplay]) -> list[str]:
    """The assumptions about spoilers and a fleet. num_replayed: requests that were replayed without a spoiler."""
    said = []
    if any(each.gain_tpot is not None for each in spoilers):
        said.append(
            f"What a spoiler costs is replayed with the first {num_replayed:,} requests, each spoiler by itself; its "
            "prompt tokens are scaled to the whole log."
        )
    if fleet:
        said.append(
            "A router knows all caches and unfinished requests at once; by prefix and by sharers it passes over "
            "engines with far more work than the others, and prefixes of less than a quarter of the prompt."
        )
    return said
