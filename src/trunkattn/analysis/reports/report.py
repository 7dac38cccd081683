"""An analysis for a terminal, and as JSON. Text of the log appears only if it is asked for."""

import math
from dataclasses import asdict
from typing import Any, Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

import trunkattn.analysis.figures as figures
from trunkattn.analysis.records import Analysis, Log, Replay, Spoiler

JSON_VERSION: Final = 1  # of the fields; a field that goes away or changes its meaning counts it up
_SHOWN_SKIPPED: Final = 5
_SHOWN_SPOILERS: Final = 10
_NOTHING: Final = 5e-4  # share of the time below which it costs nothing


def to_dict(analysis: Analysis, *, show_text: bool = False) -> dict[str, Any]:
    """An analysis as JSON values: the fields of `records`, times in the units of their names, shares from 0 to 1.

    Args:
        show_text: include what the log's prompts say where they part. Otherwise no text of a prompt is in the result.
    """
    log = analysis.log
    values = {
        "version": JSON_VERSION,
        "verdict": analysis.verdict,
        "card": analysis.card,
        "model": analysis.model,
        "token_bytes": analysis.token_bytes,
        "log": {
            "source": log.source,
            "format": log.format,
            "num_lines": log.num_lines,
            "unit": log.unit,
            "num_out_of_order": log.num_out_of_order,
            "num_requests": len(log.requests),
            "num_skipped": log.num_skipped,
            "skipped": [asdict(line) for line in log.skipped],
            "tokens_from": log.tokens_from,
        },
        "ceiling": analysis.ceiling._asdict(),
        "replays": [{**asdict(replay), **_derived(replay)} for replay in analysis.replays],
        "fleet": [asdict(replay) for replay in analysis.fleet],
        "spoilers": [asdict(spoiler) | ({} if show_text else {"examples": []}) for spoiler in analysis.spoilers],
        "assumptions": all_assumptions(analysis),
    }
    return {name: _finite(value) for name, value in values.items()}


def _derived(replay: Replay) -> dict[str, float]:
    """Figures that the tables show and no field has."""
    return {
        "decoding": figures.mean_decoding(replay.moments),
        "time_saved": figures.time_saved(replay),
        "reads_saved": figures.reads_saved(replay),
    }


def _finite(value: Any) -> Any:
    """A value that JSON has: null for a number that is not finite."""
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def all_assumptions(analysis: Analysis) -> list[str]:
    """What the reader and the replay assume, each sentence once."""
    return list(dict.fromkeys([*analysis.log.assumptions, *analysis.assumptions]))


def taken(log: Log) -> str:
    """How much of the log was taken, in words."""
    words = f"{figures.plural(len(log.requests), 'request')} of {figures.plural(log.num_lines, log.unit)}"
    words += f", {log.num_skipped:,} skipped" if log.num_skipped else ""  # of a line with several requests, some
    return words + (f", {log.num_out_of_order:,} out of order" if log.num_out_of_order else "")


def print_analysis(analysis: Analysis, console: Console, *, show_text: bool = False) -> None:
    """Prints what was read, the tables, what spoils sharing, what is assumed, and the verdict last.

    Args:
        show_text: print what the log's prompts say where they part.
    """
    log = analysis.log
    words = f"{log.source}: {log.format}, {taken(log)}; tokens from {log.tokens_from}"
    console.print(words, markup=False, highlight=False)
    for line in log.skipped[:_SHOWN_SKIPPED]:
        console.print(
            f"  {log.unit} {line.line:,} skipped: {line.reason}", markup=False, highlight=False, style="yellow"
        )
    if log.num_skipped > _SHOWN_SKIPPED:
        console.print(f"  … and {log.num_skipped - min(_SHOWN_SKIPPED, len(log.skipped)):,} more", style="yellow")
    console.print(ceiling_sentence(analysis), markup=False, highlight=False)
    if analysis.replays:
        title = f"Milliseconds per output token of {analysis.model} on {analysis.card}, predicted"
        _print_table(title, replay_table(analysis), console)
    if analysis.fleet:
        title = (
            f"The same in a fleet of {figures.plural(analysis.fleet[0].replicas, 'engine')}, by what routes requests"
        )
        _print_table(title, fleet_table(analysis), console)
    console.line()
    _print_spoilers(analysis, console, show_text)
    assumed = all_assumptions(analysis)
    console.print("[bold]Assumed[/]" if assumed else "Nothing is assumed.")
    for sentence in assumed:
        console.print(f"  • {sentence}", markup=False, highlight=False)
    console.line()
    console.print(analysis.verdict, style="bold green", markup=False, highlight=False)


def _print_table(title: str, table: Table, console: Console) -> None:
    console.line()
    console.print(title, style="bold", markup=False, highlight=False)
    console.print(table)


def _table(first: str, *columns: str) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", vertical="bottom")
    return table


def replay_table(analysis: Analysis) -> Table:
    """Each setting one by one and shared."""
    columns = ("decode\nat once", "prompts\ncached", "one by\none", "\nshared", "time\nsaved", "KV reads\nsaved")
    table = _table("\nreplayed", *columns, "tokens/s\nshared")
    for replay in analysis.replays:
        table.add_row(
            escape(replay.name),
            figures.count(figures.mean_decoding(replay.moments)),
            figures.percent(replay.hit_rate),
            f"{replay.tpot_ms:.2f}",
            f"{replay.shared_tpot_ms:.2f}",
            figures.percent(figures.time_saved(replay)),
            figures.percent(figures.reads_saved(replay)),
            figures.count(round(replay.shared_tokens_per_s)),
        )
    return table


def fleet_table(analysis: Analysis) -> Table:
    """Each way to route, one by one and shared."""
    columns = (
        "prompts\ncached",
        "one by\none",
        "\nshared",
        "time\nsaved",
        "KV reads\nsaved",
        "first token\nshared, ms",
    )
    table = _table("\nroute", *columns, "busiest\nengine")
    for one in analysis.fleet:
        table.add_row(
            one.route,
            figures.percent(one.hit_rate),
            f"{one.tpot_ms:.2f}",
            f"{one.shared_tpot_ms:.2f}",
            figures.percent(figures.saved(one.tpot_ms, one.shared_tpot_ms)),
            figures.percent(figures.saved(one.kv_bytes, one.unique_kv_bytes)),
            f"{one.shared_ttft_ms:,.0f}",
            f"{one.balance:.2f}×",
        )
    return table


def _print_spoilers(analysis: Analysis, console: Console, show_text: bool) -> None:
    if not analysis.spoilers:
        console.print(f"{no_spoilers(analysis.log)}\n", highlight=False)
        return
    console.print("[bold]What keeps prompts from sharing more[/]")
    for spoiler in analysis.spoilers[:_SHOWN_SPOILERS]:
        console.print(f"  • {spoiler_sentence(spoiler)}", markup=False, highlight=False)
        console.print(f"    {spoiler.advice} {gain_sentence(spoiler)}".rstrip(), markup=False, highlight=False)
        for example in spoiler.examples if show_text else ():
            console.print(f"    {example!r}", style="dim", markup=False, highlight=False)
    if len(analysis.spoilers) > _SHOWN_SPOILERS:
        console.print(f"  … and {len(analysis.spoilers) - _SHOWN_SPOILERS:,} smaller ones")
    console.line()


def ceiling_sentence(analysis: Analysis) -> str:
    """The sentence that says how many of the prompt tokens a cache can find at most."""
    every, later = analysis.ceiling
    return (
        f"A cache without an end finds {figures.percent(every)} of the prompt tokens in earlier prompts, and "
        f"{figures.percent(later)} in the later half of the log."
    )


def no_spoilers(log: Log) -> str:
    """What is said where nothing was found that keeps prompts from sharing more."""
    if log.texts is None and log.contents is None:
        return "The log has no text, so nothing is known of what keeps prompts from sharing more."
    return "Nothing was found that keeps prompts from sharing more."


def spoiler_sentence(spoiler: Spoiler) -> str:
    """What parts which requests where, without text of the log."""
    requests = f"{spoiler.num_requests:,} requests part" if spoiler.num_requests != 1 else "1 request parts"
    article = "an" if spoiler.kind[0] in "aeio" else "a"  # as in "a user name"
    return (
        f"{requests} at {article} {spoiler.kind} ({spoiler.where}); {figures.plural(spoiler.shared_after, 'token')} "
        "after it are equal again."
    )


def gain_sentence(spoiler: Spoiler) -> str:
    """What moving the varying part saves and what it costs, replayed; empty: it was not replayed."""
    if spoiler.gain_tpot is None or spoiler.gain_prompt_tokens is None:
        return ""
    told = (
        (spoiler.gain_tpot > -_NOTHING, f"{figures.percent(abs(spoiler.gain_tpot))} of the time per token"),
        (spoiler.gain_prompt_tokens >= 0, figures.plural(abs(spoiler.gain_prompt_tokens), "prompt token")),
    )
    sides = [" and ".join(words for is_gain, words in told if is_gain == side) for side in (True, False)]
    verbs = [f"{verb} {side}" for verb, side in zip(("saves", "costs"), sides, strict=True) if side]
    return f"That {' and '.join(verbs)}."
