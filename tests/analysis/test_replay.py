"""A replay's times, counts and pictures; loads; the published trace."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import trunkattn.analysis.figures as figures
from trunkattn.analysis.pricing.model_shape import model_shape
from trunkattn.analysis.pricing.prices import Prices
from trunkattn.analysis.reading.log import read_log
from trunkattn.analysis.records import LoggedRequest, Replay
from trunkattn.analysis.simulation.engine import EngineSize, Job, SimulatedEngine
from trunkattn.analysis.simulation.load import Feed, Load, Workload
from trunkattn.analysis.simulation.replay import replay
from trunkattn.analysis.simulation.sequences import TokenSource
from trunkattn.analysis.simulation.timeline import MAX_MOMENTS, MAX_SNAPSHOTS
from trunkattn.gpu.cards import card_named

from .replays import PRICES, SIZE, log_of

REAL_TRACE = Path(__file__).parents[4] / "shared" / "traces" / "conversation_trace.jsonl"
WINDOWED = Prices(model_shape("gpt-oss-20b"), card_named("NVIDIA H100"))  # half of its layers see 128 tokens


def at(requests: list[LoggedRequest], load: Load, size: EngineSize = SIZE) -> Replay:
    return replay(Workload.of(requests, size, 10), size, PRICES, load)


def test_a_shared_trunk_is_worth_the_more_the_more_requests_run_at_once() -> None:
    requests = log_of(48, shared=120, own=4)
    few, many = (at(requests, Load(number)) for number in (2, 32))
    assert few.shared_tpot_ms < few.tpot_ms < many.tpot_ms
    assert many.shared_tpot_ms / many.tpot_ms < 0.9 < few.shared_tpot_ms / few.tpot_ms < 1
    assert many.kv_bytes > 5 * many.unique_kv_bytes
    assert few.hit_rate == pytest.approx(47 / 48 * 120 / 124, abs=0.05)


@pytest.mark.parametrize("prices", [PRICES, WINDOWED])
def test_bytes_of_three_requests_on_a_trunk_are_those_that_one_counts_by_hand(prices: Prices) -> None:
    """The first prompt is computed, then the others while it decodes, then three decode twice and two once."""
    found = replay(Workload.of(log_of(3, shared=64, own=32, output=4), SIZE, 10), SIZE, prices, Load(3))
    seen = [(1537,), (1538, 1537, 1537), (1539, 1538, 1538), (1539, 1539)]
    unique = [sum(step) - (len(step) - 1) * 1024 for step in seen]
    layers = prices.shape.layers_by_window
    near = 128 * layers.get(128, 0) * sum(map(len, seen))  # the windows' tokens, none of which is the trunk's
    expected = near + layers[None] * sum(map(sum, seen)), near + layers[None] * sum(unique)
    counted = found.kv_bytes / prices.layer_token_bytes, found.unique_kv_bytes / prices.layer_token_bytes
    assert found.num_decode_steps == len(seen)
    assert counted == (expected if prices is PRICES else pytest.approx(expected, rel=0.01))
    assert figures.mean_bytes(found) == (found.kv_bytes / 4, found.unique_kv_bytes / 4)


def test_nothing_shared_gains_next_to_nothing() -> None:
    found = at(log_of(24, shared=0, own=100), Load(8))
    assert found.hit_rate == 0
    assert found.unique_kv_bytes == found.kv_bytes
    assert 0.95 < found.shared_tpot_ms / found.tpot_ms <= 1.02


def test_one_request_takes_what_its_steps_take() -> None:
    found = at(log_of(1, shared=0, own=100, output=101), Load(1))
    decodes = [moment for moment in found.moments if moment.decoding == 1]
    step = sum(each.shared_step_us * each.num_steps for each in decodes) / sum(each.num_steps for each in decodes)
    assert (found.num_requests, found.num_output_tokens) == (1, 101)
    assert found.shared_tpot_ms == pytest.approx(step / 1e3, rel=0.02)
    assert found.seconds == pytest.approx((found.shared_ttft_ms + 100 * found.shared_tpot_ms) / 1e3)


def test_by_time_an_engine_that_is_slower_has_more_at_once() -> None:
    found = at(log_of(60, shared=120, own=4, seconds=0.02), Load())
    assert found.name == "as logged"
    assert found.tpot_ms > 1.1 * found.shared_tpot_ms
    assert found.seconds >= 59 * 0.02
    assert sum(each.prompt_tokens for each in found.moments) == 60 * 124 * 16
    assert sum(each.cached_tokens for each in found.moments) == round(found.hit_rate * 60 * 124 * 16)


def test_times_and_trees_stay_within_bounds() -> None:
    found = at(log_of(80, shared=20, own=4, output=300), Load(4))
    assert 20 < len(found.moments) <= MAX_MOMENTS
    assert 3 < len(found.snapshots) <= MAX_SNAPSHOTS
    assert [each.start for each in found.moments] == sorted(each.start for each in found.moments)
    for snapshot in found.snapshots:
        roots = [node for node in snapshot.nodes if node.parent == -1]
        assert sum(node.sequences for node in roots) <= 4
        for number, node in enumerate(snapshot.nodes):
            parent = snapshot.nodes[node.parent] if node.parent >= 0 else None
            assert node.parent < number
            assert node.tokens > 0
            assert node.start == (0 if parent is None else parent.start + parent.tokens)


def test_several_answers_share_their_prompt() -> None:
    requests = [replace(each, num_answers=8) for each in log_of(4, shared=0, own=100)]
    found = at(requests, Load(8))
    assert found.num_output_tokens == 4 * 8 * 60
    assert found.kv_bytes > 4 * found.unique_kv_bytes


def test_a_turn_waits_for_the_one_before_it() -> None:
    turns = [LoggedRequest(i + 1, 0.0, 160, 5, np.arange(10) + 100 * i, 16, session="a", turn=i) for i in range(3)]
    feed = Feed(Workload.of(turns, EngineSize(100), 1), [0.0, 0.1, 0.2])
    _, first = feed.pop()
    assert not feed
    feed.ended(first, 7.5)
    time, second = feed.pop()
    assert (time, second.logged.turn) == (7.5, 1)
    assert at(turns, Load(3)).num_requests == 3


def test_a_turn_finds_the_answer_before_it_in_the_cache() -> None:
    """Also within the block in which the prompt before it ended."""
    first = LoggedRequest(1, 0.0, 100, 50, np.arange(7), 16, session="a")
    later = LoggedRequest(2, 1.0, 200, 5, np.array([*range(6), *range(20, 27)]), 16, session="a", turn=1)
    stranger = LoggedRequest(3, 2.0, 200, 5, np.array([*range(6), *range(30, 37)]), 16)
    found = at([first, later, stranger], Load(1))
    assert round(found.hit_rate * 500) == 144 + 96  # 149 tokens of the first have their KV, in whole pages


def test_loads_have_names_and_times() -> None:
    requests = log_of(10, 1, 1, seconds=2.0)
    assert Load(rate=5.0).times(requests)[-1] == pytest.approx(2.0)
    without = [replace(each, arrival=None) for each in requests]
    times = Load(rate=5.0, seed=3).times(without)
    assert times[0] == 0 and times == sorted(times) and times == Load(rate=5.0, seed=3).times(without)
    assert [load.name for load in (Load(), Load(3), Load(rate=0.5))] == ["as logged", "3 at a time", "0.5 requests/s"]
    with pytest.raises(ValueError, match="no times of arrival"):
        Load().times(without)
    with pytest.raises(ValueError, match=r"rate=0: expected a finite number above 0"):
        Load(rate=0).times(requests)


def test_requests_that_do_not_fit_are_left_out_and_counted() -> None:
    requests = [*log_of(3, 0, 10), *log_of(1, 0, 300)]
    workload = Workload.of([replace(each, num_output_tokens=None) for each in requests], EngineSize(num_pages=50), 64)
    assert (len(workload.jobs), workload.num_left_out, workload.num_guessed) == (3, 1, 3)
    assert {tokens for _, tokens in workload.jobs} == {64}


def test_block_numbers_may_be_any_integers() -> None:
    requests = log_of(6, shared=10, own=2)
    odd = [replace(each, blocks=each.blocks * 987654321987 - (1 << 62)) for each in requests]
    assert at(odd, Load(3)).hit_rate == at(requests, Load(3)).hit_rate > 0


@pytest.mark.skipif(not REAL_TRACE.is_file(), reason="the published trace is not here")
def test_the_published_trace_hits_as_often_as_its_blocks_allow() -> None:
    """In a cache without an end, one request at a time: what no cache can exceed, in whole blocks of 512 tokens."""
    requests = read_log(REAL_TRACE).requests
    engine = SimulatedEngine(EngineSize(400_000, 512, 1, 1 << 20), TokenSource(requests))
    seen: set[int] = set()
    hits = 0
    for request in requests:
        known = 0
        while known < len(request.blocks) and int(request.blocks[known]) in seen:
            known += 1
        hits += 512 * min(known, (request.num_prompt_tokens - 1) // 512)
        seen.update(request.blocks.tolist())
        engine.add(Job(request, 1))
        while engine.scheduler.has_unfinished:
            engine.schedule()
            engine.update()
    stats = engine.scheduler.stats
    assert (len(requests), stats.prefix_cache_hits) == (12_031, hits)
    assert stats.prefix_cache_hits / stats.prefix_cache_queries == pytest.approx(0.3733, abs=1e-4)
    assert stats.prefix_cache_queries == sum(request.num_prompt_tokens for request in requests)
