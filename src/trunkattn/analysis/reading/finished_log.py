"""The log of collected requests: what was logged twice left out, in order of arrival, with the reader's assumptions."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trunkattn.analysis.figures import plural
from trunkattn.analysis.formats.base import Format
from trunkattn.analysis.reading.collected import Collected
from trunkattn.analysis.reading.tokens import ByteEstimate, mixed
from trunkattn.analysis.records import Log, LoggedRequest, SkippedLine

SAMPLED_HASHES: Final = 1 << 20  # by which one sees whether hashes depend on what precedes their block


def finished_log(collected: Collected, chosen: Format) -> Log:
    """The log of all that was collected. Some lines may still count as skipped in its tally, or as its first fault."""
    requests, tally, texts = collected.requests, collected.tally, collected.texts
    if texts:
        texts.fill(len(requests))
    has_contents = len(collected.contents) == len(requests) and depend_only_on_contents(collected.contents)
    repeated = _repeated(collected)
    order = _order(collected, repeated)
    late = _late(collected, order)
    return Log(
        source=tally.source,
        format=chosen.title,
        requests=_in_order(collected, order),
        num_lines=tally.num_lines,
        unit=tally.unit,
        num_out_of_order=len(late),
        num_skipped=tally.num_skipped,
        skipped=sorted(tally.skipped, key=lambda skipped: skipped.line),
        tokens_from=_tokens_from(collected),
        assumptions=_assumptions(collected, has_contents, late, len(repeated)),
        texts=texts.taken(order) if texts else None,
        encode=collected.encoder.encode if texts else None,
        contents=[collected.contents[place] for place in order] if has_contents else None,
    )


def _tokens_from(collected: Collected) -> str:
    """Where counts and blocks come from, for people."""
    if collected.texts:
        return collected.encoder.tokens_from
    if len(collected.contents) < len(collected.requests):
        return "token ids"
    return "block hashes" if any(len(ids) for ids in collected.contents) else "the log's own counts"


def _repeated(collected: Collected) -> set[int]:
    """The places of calls that repeat another call. Each first gives that call the fields that it lacks."""
    requests = collected.requests
    found: set[int] = set()
    for call, kept, is_same in collected.tally.repeated:
        place, other = collected.places.get(call), collected.places.get(kept)
        if place is None or other is None:
            continue
        found.add(place)
        if is_same:
            mine, its = requests[place], requests[other]
            known = mine.num_output_tokens if its.num_output_tokens is None else its.num_output_tokens
            session, model = its.session or mine.session, its.model or mine.model
            requests[other] = replace(its, num_output_tokens=known, session=session, model=model)
    return found


def _order(collected: Collected, repeated: set[int]) -> list[int]:
    """The places of the requests that stay, in order of arrival; requests of one moment keep the log's order. If some
    requests have times, those without are left out, because their place is unknown."""
    requests = collected.requests
    places = [place for place in range(len(requests)) if place not in repeated]
    timed = [place for place in places if requests[place].arrival is not None]
    if not timed:
        return places
    for place in places:
        if requests[place].arrival is None:
            line = requests[place].line
            collected.tally.skip(SkippedLine(line, "it has no time, and other requests of the log have one"))
    return sorted(timed, key=lambda place: (requests[place].arrival or 0.0, requests[place].key))


def _in_order(collected: Collected, order: Sequence[int]) -> list[LoggedRequest]:
    """The requests in order, with their turns and their times since the first request."""
    start = collected.requests[order[0]].arrival
    counts: dict[str, int] = {}
    found = []
    for place in order:
        request, turn = collected.requests[place], collected.turns[place]
        if request.session is not None:
            turn = counts.get(request.session, 0) if turn is None else turn
            counts[request.session] = turn + 1
        since = None if request.arrival is None or start is None else request.arrival - start
        found.append(replace(request, arrival=since, turn=turn or 0))
    return found


def _late(collected: Collected, order: Sequence[int]) -> list[int]:
    """The lines of requests that arrived before a request further up. The first of them is noted as a fault."""
    by_line = sorted((collected.requests[place] for place in order), key=lambda request: request.line)
    arrivals = np.array([request.arrival or 0.0 for request in by_line])
    latest = np.maximum.accumulate(arrivals) if len(arrivals) else arrivals
    late = np.flatnonzero(arrivals < latest).tolist()
    for place in late[:1]:
        back = f"its time is {latest[place] - arrivals[place]:g} s before that of a request further up"
        fault = SkippedLine(by_line[place].line, f"{back}; expected times that do not run backwards")
        collected.tally.find(fault)
    return [by_line[place].line for place in late]


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
    if not any(len(ids) for ids in collected.contents) and collected.contents and not collected.texts:
        found.append("The log has neither prompts nor block hashes, so no prompt is known to be shared.")
    elif collected.contents and not collected.texts and not has_contents:
        found.append("The log's hashes are of all that precedes a block, so they tell no field that spoils sharing.")
    if any(request.arrival is None for request in collected.requests[:1]):
        found.append("The log has no times, so it says nothing about which requests ran together.")
    return found


def depend_only_on_contents(blocks: Sequence[NDArray[np.int64]]) -> bool:
    """Whether a log's hashes depend on a block's contents only: then a hash recurs after different predecessors."""
    ids = np.concatenate([np.zeros(0, np.int64), *blocks])
    before = np.roll(ids, 1)
    starts = np.cumsum([0, *(len(some) for some in blocks)])
    before[starts[starts < len(ids)]] = -1
    rarely = np.uint64(max(1, len(ids) // SAMPLED_HASHES))
    sampled = mixed(ids.view(np.uint64)) % rarely == 0
    ids, before = ids[sampled], before[sampled]
    order = np.lexsort((before, ids))
    comes_again = np.diff(ids[order]) == 0
    behind_other = comes_again & (np.diff(before[order]) != 0)
    return int(behind_other.sum()) > 0.01 * int(comes_again.sum())
