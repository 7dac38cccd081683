"""Figures that reports derive from an analysis, and how numbers are written for people."""

from collections.abc import Sequence
from typing import Final

from trunkattn.analysis.records import Analysis, Moment, Replay

AS_LOGGED: Final = "as logged"  # name of the replay of a log's own times
_SIZES: Final = ("B", "kB", "MB", "GB", "TB", "PB", "EB")


def saved(before: float, after: float) -> float:
    """Share of `before` that is saved; 0 where there was nothing."""
    return 1 - after / before if before > 0 else 0.0


def time_saved(replay: Replay) -> float:
    """Share of the time per output token that sharing saves."""
    return saved(replay.tpot_ms, replay.shared_tpot_ms)


def reads_saved(replay: Replay) -> float:
    """Share of the KV bytes of decode steps that sharing saves."""
    return saved(replay.kv_bytes, replay.unique_kv_bytes)


def mean_decoding(moments: Sequence[Moment]) -> float:
    """Sequences that decode in a step, as a mean."""
    steps = sum(moment.num_steps for moment in moments)
    return sum(moment.decoding * moment.num_steps for moment in moments) / steps if steps else 0.0


def mean_bytes(replay: Replay) -> tuple[float, float]:
    """KV bytes that a decode step reads one by one and shared, as means."""
    steps = max(1, replay.num_decode_steps)
    return replay.kv_bytes / steps, replay.unique_kv_bytes / steps


def is_closed(replay: Replay) -> bool:
    """Whether a replay keeps a number of requests running."""
    return replay.rate is None and replay.name != AS_LOGGED


def closed_loops(analysis: Analysis) -> list[Replay]:
    """Replays that keep a number of requests running, the fewest first."""
    return sorted(filter(is_closed, analysis.replays), key=lambda replay: replay.concurrency)


def percent(share: float) -> str:
    """A share, with a decimal where it is small: "39 %", "0.4 %"."""
    value = 100 * share
    digits = 1 if 0.05 <= abs(value) < 9.95 and abs(value - round(value)) >= 0.05 else 0
    return f"{value:.{digits}f} %".replace("-0 %", "0 %")


def count(number: float) -> str:
    """A count: "12,031", and "3.4" where it is a small mean."""
    return f"{number:,.1f}" if number < 99.5 and abs(number - round(number)) >= 0.05 else f"{number:,.0f}"


def plural(number: int, word: str) -> str:
    """A count of things: "1 request", "2 requests", "2 entries"."""
    if number != 1:
        word = "entries" if word == "entry" else f"{word}s"
    return f"{number:,} {word}"


def size(number: float) -> str:
    """Bytes in decimal units: "4.2 GB"."""
    unit = 0
    while number >= 999.5 and unit < len(_SIZES) - 1:
        number, unit = number / 1000, unit + 1
    return f"{number:.1f} {_SIZES[unit]}" if unit and number < 9.95 else f"{number:.0f} {_SIZES[unit]}"


def milliseconds(time_ms: float) -> str:
    """A time in about three digits, in seconds where it is long."""
    if time_ms >= 10_000:
        return seconds(time_ms / 1000)
    if time_ms >= 1000:
        return f"{time_ms / 1000:.2f} s"
    return f"{time_ms:.{2 if time_ms < 9.995 else 1 if time_ms < 99.95 else 0}f} ms"


def moment(time: float) -> str:
    """A time among others close to it: like `seconds`, but "2:24 min" between two minutes."""
    minutes, rest = divmod(round(time), 60)
    return f"{minutes}:{rest:02d} min" if time >= 119.5 and minutes < 120 and rest else seconds(time)


def seconds(time: float) -> str:
    """A time: "12 s", "59 min", "3 h 20 min"."""
    if 0.05 <= time < 9.95 and time != round(time):
        return f"{time:.1f} s"
    if time < 119.5:
        return f"{time:.0f} s"
    minutes = round(time / 60)
    if minutes < 120:
        return f"{minutes} min"
    return f"{minutes // 60} h" + (f" {minutes % 60} min" if minutes % 60 else "")
