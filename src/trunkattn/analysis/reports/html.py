"""An analysis as one HTML file, which asks no host for anything, runs no script, and fits a phone and paper."""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined

import trunkattn.analysis.figures as figures
from trunkattn.analysis.records import Analysis, Log, Replay, TrieNode
from trunkattn.analysis.reports import charts, report
from trunkattn.analysis.requests import Requests

_TEMPLATE: Final = "report.html"
_TEXT_CHARACTERS: Final = 240  # of a prompt's text in a box


def to_html(analysis: Analysis, *, show_text: bool = False) -> str:
    """The report.

    Everything that comes from the log is escaped, and the page forbids scripts and requests to itself, so a log can
    put nothing into it but text.

    Args:
        analysis: what is reported.
        show_text: include what the log's prompts say. Otherwise no text of a prompt is in the result.
    """
    environment = Environment(
        loader=PackageLoader("trunkattn.analysis.reports", "static"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_together,
    )
    first = analysis.replays[0] if analysis.replays else None
    return environment.get_template(_TEMPLATE).render(
        analysis=analysis,
        first=first,
        show_text=show_text,
        figures=figures,
        report=report,
        icicles=_icicles(analysis, first, show_text) if first else [],
        icicle_pixels=charts.ICICLE_PIXELS,
        concurrency=charts.concurrency_chart(analysis),
        over_time=[chart for chart in _over_time(first) if chart],
        most_skipped=len(analysis.log.skipped),
    )


def _together(value: Any) -> Any:
    """A text in which no line ends between a number and its percent sign."""
    return value.replace(" %", "\u00a0%") if isinstance(value, str) else value


def _over_time(first: Replay | None) -> list[charts.Chart | None]:
    return [charts.time_chart(first.moments), charts.hits_chart(first.moments)] if first else []


def _icicles(analysis: Analysis, replay: Replay, show_text: bool) -> list[charts.Icicle]:
    """The prefix trees of a replay to one scale of tokens; those in which nothing decodes are left out."""
    ends = [node.start + node.tokens for snapshot in replay.snapshots for node in snapshot.nodes]
    prompt_of = _prompts(analysis.log) if show_text and analysis.log.texts is not None else _no_prompt
    drawn = [
        charts.icicle(snapshot, analysis.token_bytes, max(ends), prompt_of)
        for snapshot in replay.snapshots
        if snapshot.nodes
    ]
    return [icicle for icicle in drawn if icicle]


def _no_prompt(node: TrieNode) -> str:
    return ""


def _prompts(log: Log) -> Callable[[TrieNode], str]:
    """The text of a node: the part of its request's prompt that begins as far from the start as its tokens do."""
    texts = log.texts
    assert texts is not None
    rows = Requests.of(log.requests).rows

    def prompt_of(node: TrieNode) -> str:
        places = np.flatnonzero((rows["line"] == node.line) & (rows["part"] == node.part)).tolist()
        if not places:
            return ""
        request, text = log.requests[places[0]], texts[places[0]]
        start = len(text) * node.start // max(1, request.num_prompt_tokens)
        return " ".join(text[start : start + _TEXT_CHARACTERS].split())

    return prompt_of
