"""The log of collected requests: what was logged twice left out, in order of arrival, with the reader's assumptions."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from trunkattn.analysis.figures import plural
from trunkattn.analysis.formats.base import Format
from trunkattn.analysis.reading.collected import Collected
from trunkattn.analysis.reading.tokens import ByteEstimate, mixed
from trunkattn.analysis.records import Log, SkippedLine
from trunkattn.analysis.requests import UNKNOWN, Blocks, Requests

SAMPLED_HASHES: Final = 1 << 20  # by which one sees whether hashes depend on what precedes their block


def finished_log(collected: Collected, chosen: Format) -> Log:
    """The log of all that was collected. Some lines may still count as skipped in its tally, or as its first fault."""
    read, tally, texts, contents = collected.requests.done(), collected.tally, collected.texts, None
    if texts:
        texts.fill(len(read))
    if len(collected.contents) == len(read) and depend_only_on_contents(collected.contents.done()):
        contents = collected.contents.done()
    read.rows["part"] = _parts(read.rows["line"])
    is_repeated = _repeated(collected, read.rows)
    order = _order(collected, read.rows, is_repeated)
    late = _late(collected, read.rows[order])
    return Log(
        source=tally.source,
        format=chosen.title,
        requests=_in_order(read[order]),
        num_lines=tally.num_lines,
        unit=tally.unit,
        num_out_of_order=len(late),
        num_skipped=tally.num_skipped,
        skipped=sorted(tally.skipped, key=lambda skipped: skipped.line),
        tokens_from=_tokens_from(collected),
        assumptions=_assumptions(collected, contents is not None, late, int(is_repeated.sum())),
        texts=texts.taken(order) if texts else None,
        encode=collected.encoder.encode if texts else None,
        contents=None if contents is None else contents[order],
    )


def _tokens_from(collected: Collected) -> str:
    """Where counts and blocks come from, for people."""
    if collected.texts:
        return collected.encoder.tokens_from
    if len(collected.contents) < len(collected.requests):
        return "token ids"
    return "block hashes" if collected.contents.numbers else "the log's own counts"


def _parts(lines: NDArray[np.int64]) -> NDArray[np.int64]:
    """Which request of its line each is, from 0, in the order in which they were read."""
    order = np.argsort(lines, kind="stable")
    starts = np.flatnonzero(np.diff(lines[order], prepend=lines[order][:1] - 1))
    parts = np.empty_like(order)
    parts[order] = np.arange(len(order)) - np.repeat(starts, np.diff(starts, append=len(order)))
    return parts


def _repeated(collected: Collected, rows: NDArray[Any]) -> NDArray[np.bool_]:
    """Which requests repeat another one. Each first gives that one the fields that it lacks."""
    found = np.zeros(len(rows), bool)
    if not collected.tally.repeated:
        return found
    places = {call: place for place, call in enumerate(collected.calls) if call != UNKNOWN}
    for call, kept, is_same in collected.tally.repeated:
        place, other = places.get(call), places.get(kept)
        if place is None or other is None:
            continue
        found[place] = True
        for name in ("num_output_tokens", "session", "model") if is_same else ():
            if rows[name][other] == UNKNOWN:
                rows[name][other] = rows[name][place]
    return found


def _order(collected: Collected, rows: NDArray[Any], is_repeated: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The places of the requests that stay, in order of arrival; requests of one moment keep the log's order. If some
    requests have times, those without are left out, because their place is unknown."""
    has_time = ~np.isnan(rows["arrival"])
    timed = np.flatnonzero(has_time & ~is_repeated)
    if not len(timed):
        return np.flatnonzero(~is_repeated)
    for line in rows["line"][~has_time & ~is_repeated].tolist():
        collected.tally.skip(SkippedLine(line, "it has no time, and other requests of the log have one"))
    return timed[np.lexsort([rows[name][timed] for name in ("part", "line", "arrival")])]


def _in_order(requests: Requests) -> Requests:
    """The requests, which are in order, with their turns and their times since the first one."""
    rows = requests.rows
    counts: dict[int, int] = {}
    for place in np.flatnonzero(rows["session"] != UNKNOWN).tolist():
        session, turn = int(rows["session"][place]), int(rows["turn"][place])
        turn = counts.get(session, 0) if turn == UNKNOWN else turn
        counts[session], rows["turn"][place] = turn + 1, turn
    rows["turn"] = np.maximum(rows["turn"], 0)
    rows["arrival"] -= rows["arrival"][0]
    return requests


def _late(collected: Collected, rows: NDArray[Any]) -> list[int]:
    """The lines of requests that arrived before a request further up. The first of them is noted as a fault. rows: in
    order of arrival."""
    by_line = rows[np.argsort(rows["line"], kind="stable")]
    lines, arrivals = by_line["line"], np.nan_to_num(by_line["arrival"])
    latest = np.maximum.accumulate(arrivals)
    late = np.flatnonzero(arrivals < latest)
    for place in late[:1].tolist():
        back = f"its time is {latest[place] - arrivals[place]:g} s before that of a request further up"
        fault = SkippedLine(int(lines[place]), f"{back}; expected times that do not run backwards")
        collected.tally.find(fault)
    found: list[int] = lines[late].tolist()
    return found


def _assumptions(collected: Collected, has_contents: bool, late: Sequence[int], num_repeated: int) -> list[str]:
    """What the reader took for granted, a sentence each."""
    found = []
    if num_repeated:
        found.append(
            "Each call counts once: what tells of one again, by the same id or as a span around it, is left out "
            f"({plural(num_repeated, 'time')})."
        )
    if late:
        found.append(
            f"{plural(len(late), 'request')} out of order, the first in {collected.tally.unit} {late[0]:,}: all are "
            "replayed in the order of their times."
        )
    told, counted = collected.tokens_told, collected.tokens_found
    if not isinstance(collected.encoder, ByteEstimate) and told and abs(counted / told - 1) > 0.02:
        found.append(
            f"The log counts {told:,} prompt tokens, and {collected.encoder.tokens_from} counts {counted:,}; the "
            "latter are used."
        )
    if not collected.contents.numbers and len(collected.contents) and not collected.texts:
        found.append("The log has neither prompts nor block hashes, so no prompt is known to be shared.")
    elif len(collected.contents) and not collected.texts and not has_contents:
        found.append("The log's hashes are of all that precedes a block, so they tell no field that spoils sharing.")
    if np.isnan(collected.requests.done().rows["arrival"][0]):
        found.append("The log has no times, so it says nothing about which requests ran together.")
    return found


def depend_only_on_contents(blocks: Sequence[NDArray[np.int64]]) -> bool:
    """Whether a log's hashes depend on a block's contents only: then a hash recurs after different predecessors."""
    joined = Blocks.joined(blocks)
    ids, is_first = joined.numbers, np.zeros(len(joined.numbers), bool)
    is_first[joined.starts[joined.starts < len(ids)]] = True
    rarely = np.uint64(max(1, len(ids) // SAMPLED_HASHES))
    sampled = np.flatnonzero(mixed(ids.view(np.uint64)) % rarely == 0)
    before = np.where(is_first[sampled], -1, ids[sampled - 1])
    ids = ids[sampled]
    order = np.lexsort((before, ids))
    comes_again = np.diff(ids[order]) == 0
    behind_other = comes_again & (np.diff(before[order]) != 0)
    return int(behind_other.sum()) > 0.01 * int(comes_again.sum())
