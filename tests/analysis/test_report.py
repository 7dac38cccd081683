"""What is written about an analysis: the terminal's tables, the JSON, the HTML; and that no text of a log leaves."""

import io
import json
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from rich.console import Console

from trunkattn.analysis import figures
from trunkattn.analysis.records import Analysis, Snapshot, TrieNode
from trunkattn.analysis.reports import charts
from trunkattn.analysis.reports.html import to_html
from trunkattn.analysis.reports.report import JSON_VERSION, gain_sentence, print_analysis, spoiler_sentence, to_dict
from trunkattn.analysis.texts import Texts

from .analyses import HOSTILE, SECRET, busy_analysis, quiet_analysis, snapshot


def printed(analysis: Analysis, width: int = 120, **options: bool) -> str:
    console = Console(file=io.StringIO(), width=width)
    print_analysis(analysis, console, **options)
    assert isinstance(console.file, io.StringIO)
    return " ".join(console.file.getvalue().split())


def test_the_terminal_shows_what_was_found() -> None:
    text = printed(busy_analysis())
    assert "40 requests of 54 lines, 14 skipped" in text and "line 9 skipped: not JSON" in text
    assert "… and 12 more" in text
    assert "as logged 175 39 % 20.82 17.28 17 % 34 % 13,330" in text
    assert "prefix 38 % 11.00 3.40 69 % 25 % 280 1.40×" in text
    assert "8,120 requests part at a timestamp (system message, token 37 of 2,210)" in text
    assert "That saves 21 % of the time per token and 17,644,760 prompt tokens." in text
    assert text.endswith("At 58 requests at a time sharing gains 17 %.")


@pytest.mark.parametrize(
    ("gains", "sentence"),
    [
        ((0.21, 3000), "That saves 21 % of the time per token and 3,000 prompt tokens."),
        ((-0.007, 3000), "That saves 3,000 prompt tokens and costs 0.7 % of the time per token."),
        ((0.1, -1), "That saves 10 % of the time per token and costs 1 prompt token."),
        ((-0.1, -5), "That costs 10 % of the time per token and 5 prompt tokens."),
        ((-1e-9, 0), "That saves 0 % of the time per token and 0 prompt tokens."),
        ((None, None), ""),
    ],
)
def test_what_a_spoiler_saves_and_costs_is_told_apart(gains: tuple[float | None, int | None], sentence: str) -> None:
    spoiler = busy_analysis().spoilers[0]
    assert gain_sentence(replace(spoiler, gain_tpot=gains[0], gain_prompt_tokens=gains[1])) == sentence
    assert "part at an order of tools" in spoiler_sentence(replace(spoiler, kind="order of tools"))


def test_that_nothing_was_found_is_said() -> None:
    blind = quiet_analysis()
    seeing = replace(blind, log=replace(blind.log, texts=Texts(["a", "b", "c"])))
    for analysis, sentence in (
        (blind, "The log has no text, so nothing is known of what keeps prompts from sharing more."),
        (seeing, "Nothing was found that keeps prompts from sharing more."),
    ):
        assert sentence in printed(analysis) and sentence in to_html(analysis)


def test_what_is_not_there_is_not_shown() -> None:
    text = printed(quiet_analysis(), 80)
    assert "skipped" not in text
    html = to_html(quiet_analysis())
    assert "skipped" not in html and "Who reads what" not in html


@pytest.mark.parametrize("show_text", [False, True])
def test_text_appears_only_if_it_is_asked_for(show_text: bool) -> None:
    analysis = busy_analysis()
    for text in (
        printed(analysis, show_text=show_text),
        json.dumps(to_dict(analysis, show_text=show_text)),
        to_html(analysis, show_text=show_text),
    ):
        assert (SECRET in text) is show_text


def test_the_json_has_a_version_and_every_figure() -> None:
    analysis = busy_analysis()
    written = json.loads(json.dumps(to_dict(analysis), allow_nan=False))
    assert written["version"] == JSON_VERSION
    assert written["log"]["num_requests"] == 40 and written["log"]["num_skipped"] == 14
    assert "requests" not in written["log"] and "texts" not in written["log"]
    first, replay = written["replays"][0], analysis.replays[0]
    assert first["shared_tpot_ms"] == replay.shared_tpot_ms and len(first["moments"]) == len(replay.moments)
    assert first["time_saved"] == pytest.approx(0.17) and first["reads_saved"] == pytest.approx(0.34)
    assert written["spoilers"][0]["gain_prompt_tokens"] == 17_644_760 and written["spoilers"][0]["examples"] == []
    assert [one["route"] for one in written["fleet"]] == ["random", "prefix", "sharers"]
    assert written["assumptions"][0] == "A token is 4 bytes of text."


def test_a_number_that_json_does_not_have_becomes_null() -> None:
    analysis = quiet_analysis()
    broken = replace(analysis, replays=[replace(analysis.replays[0], tpot_ms=float("nan"))])
    assert to_dict(broken)["replays"][0]["tpot_ms"] is None


class Elements(HTMLParser):
    """Names of all elements, and every address that one names."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.addresses: set[str] = set()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.addresses |= {str(value) for name, value in attributes if name in ("src", "href", "action", "data")}


@pytest.mark.parametrize("show_text", [False, True])
def test_a_log_puts_no_element_into_the_page(show_text: bool) -> None:
    html = to_html(busy_analysis(), show_text=show_text)
    elements = Elements()
    elements.feed(html)
    assert HOSTILE not in html and "&lt;script&gt;" in html
    assert not elements.names & {"script", "img", "iframe", "object", "embed", "form"}
    assert all(address == "data:," or address.startswith("#") for address in elements.addresses), elements.addresses
    assert "default-src 'none'" in html


def test_without_replays_the_page_still_has_the_lines_that_were_skipped() -> None:
    html = to_html(replace(busy_analysis(), replays=[], fleet=[], spoilers=[]))
    assert "14 skipped" in html and "not JSON" in html


def test_boxes_are_as_high_as_what_is_read_one_by_one() -> None:
    nodes = [
        TrieNode(-1, 0, 100, 3, 1),
        TrieNode(0, 100, 300, 2, 1),
        TrieNode(1, 400, 100, 1, 1),
        TrieNode(1, 400, 0, 1, 2),
        TrieNode(0, 100, 0, 1, 3),
        TrieNode(-1, 0, 500, 1, 4),
    ]
    found = charts.icicle(Snapshot(1.0, nodes), 1000, 500, lambda node: "")
    assert found is not None and found.sequences == 4
    trunk, document = found.boxes  # of 500 + 400 + 100 + 500 tokens one by one
    assert (trunk.x, trunk.width, trunk.y, trunk.height) == (0, 20, 0, pytest.approx(100 * 1000 / 1500, abs=0.001))
    assert (document.x, document.width, document.height) == (20, 60, 60)
    assert "100 tokens from 0 on, read by 3 requests: 300 kB one by one, 100 kB shared" in trunk.text
    assert found.leaves.count("M") == 2 and not found.thin_leaves
    assert [text for _, text in found.legend] == ["read by 3", "read by 2", "one request's own"]


def test_children_lie_within_their_parent() -> None:
    found = charts.icicle(snapshot(0.0, 200), 131_072, 8000, lambda node: "")
    assert found is not None and len(found.boxes) == 3
    trunk, *documents = found.boxes
    assert sum(box.height for box in documents) == pytest.approx(trunk.height, abs=0.01)
    assert documents[0].y == trunk.y and documents[1].y == pytest.approx(documents[0].height, abs=0.01)
    assert found.thin_leaves, "boxes of a pixel have no edge"


def test_a_moment_without_requests_has_no_picture() -> None:
    assert charts.icicle(Snapshot(0.0, []), 1, 1, lambda node: "") is None


def test_a_curve_stops_where_nothing_ran() -> None:
    chart = charts.time_chart(busy_analysis().replays[0].moments)
    assert chart is not None
    assert chart.curves[0].path.count("M") == 2
    assert [tick.text for tick in chart.x_ticks] == ["0 min", "10 min", "20 min", "30 min"]
    assert charts.time_chart(busy_analysis().replays[0].moments[:1]) is None


def test_concurrency_is_drawn_from_the_closed_loops() -> None:
    chart = charts.concurrency_chart(busy_analysis())
    assert chart is not None and [tick.text for tick in chart.x_ticks] == ["1", "4", "16"]
    assert [len(curve.dots) for curve in chart.curves] == [3, 3]
    assert charts.concurrency_chart(quiet_analysis()) is None


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (figures.percent(0.394), "39 %"),
        (figures.percent(0.012), "1.2 %"),
        (figures.percent(0.01), "1 %"),
        (figures.percent(0.0001), "0 %"),
        (figures.percent(-0.0001), "0 %"),
        (figures.percent(-0.034), "-3.4 %"),
        (figures.percent(1.0), "100 %"),
        (figures.size(0), "0 B"),
        (figures.size(999.6), "1.0 kB"),
        (figures.size(4.23e9), "4.2 GB"),
        (figures.size(33e15), "33 PB"),
        (figures.milliseconds(7.423), "7.42 ms"),
        (figures.milliseconds(402.2), "402 ms"),
        (figures.milliseconds(1234.0), "1.23 s"),
        (figures.milliseconds(90_000.0), "90 s"),
        (figures.moment(98), "98 s"),
        (figures.moment(144.2), "2:24 min"),
        (figures.moment(600), "10 min"),
        (figures.moment(12_000), "3 h 20 min"),
        (figures.seconds(0), "0 s"),
        (figures.seconds(1.25), "1.2 s"),
        (figures.seconds(3541), "59 min"),
        (figures.seconds(12_000), "3 h 20 min"),
        (figures.count(3.44), "3.4"),
        (figures.count(12_031), "12,031"),
        (figures.plural(1, "line"), "1 line"),
    ],
)
def test_numbers_are_written_for_people(written: str, expected: str) -> None:
    assert written == expected
