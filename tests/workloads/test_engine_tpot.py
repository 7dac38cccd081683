"""benchmarks/vllm_tpot.py without an engine: the pace of made-up token times, and the table of one back end or more."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from vllm_tpot import LONG, SHORT, Generated, Workload, measure, pace, table


def steady(start: float, step: float, tokens: int = LONG, at_once: int = 1) -> list[tuple[float, int]]:
    """A request whose first token comes at `start`, and the others `step` seconds apart, `at_once` together."""
    counts = [*range(1, tokens, at_once), tokens]
    return [(start + (count - 1) * step, count) for count in counts]


@pytest.mark.parametrize("at_once", [1, 8])
def test_the_pace_is_that_of_steps_however_many_tokens_come_together(at_once: int) -> None:
    requests = [steady(100.0, 0.0125, at_once=at_once), steady(100.3, 0.0125, at_once=at_once)]
    assert pace(requests) == pytest.approx(12.5)


def test_prompts_at_the_beginning_and_empty_places_at_the_end_are_not_in_the_pace() -> None:
    """One request starts late: until then steps are slow, and fast from when the others have ended."""
    early = [(0.5 * count, count) for count in range(1, 21)]  # half a second a step while prompts are computed
    early += [(10 + 0.01 * (count - 20), count) for count in range(21, LONG + 1)]
    late = [(10 + 0.01 * (count - 1), count) for count in range(1, LONG - 18)]
    late += [(late[-1][0] + 0.001 * more, len(late) + more) for more in range(1, 20)]
    assert pace([early, late]) == pytest.approx(10.0)
    assert pace([late, early]) == pytest.approx(10.0)


def test_the_slow_first_steps_of_the_last_request_are_not_in_the_pace() -> None:
    slow = [(0.1 * count, count) for count in range(1, SHORT + 1)]
    slow += [(slow[-1][0] + 0.02 * more, SHORT + more) for more in range(1, LONG - SHORT + 1)]
    assert pace([slow]) == pytest.approx(20.0)


def test_requests_that_do_not_decode_together_have_no_pace() -> None:
    with pytest.raises(ValueError, match="decoded at once for 0 tokens: expected 32 or more"):
        pace([steady(0.0, 0.01), steady(10.0, 0.01)])
    with pytest.raises(ValueError, match="decoded at once for 2"):
        pace([steady(0.0, 0.01), steady(1.0, 0.01)])


def test_each_batch_is_generated_once_for_the_cache_and_timed_in_each_repeat() -> None:
    asked = []

    def generate(prompts: list[list[int]], tokens: int) -> Generated:
        asked.append(tokens)
        step = 0.01 * len(asked)
        return Generated([list(range(tokens))] * len(prompts), [steady(0.0, step, tokens)] * len(prompts))

    found = measure(generate, [[1], [2]], 3)
    assert asked == [SHORT, LONG, LONG, LONG]
    assert found == {"tpot_ms": 30.0, "tpot_ms_each": [20.0, 30.0, 40.0], "tokens": [list(range(16))] * 2}


def test_a_table_is_made_of_the_back_ends_that_there_are() -> None:
    workload = Workload(2, ((1, 32),))
    figures = {"tpot_ms": 12.0, "tpot_ms_each": [12.0], "tokens": [[1] * 16, [2] * 16]}
    first = {"FLASH_ATTN": {str(workload): figures}}
    assert table(first, [workload]) == [
        {"workload": "2 x (32)", "FLASH_ATTN": {"tpot_ms": 12.0, "tpot_ms_each": [12.0]}}
    ]
    parted = {**figures, "tpot_ms": 8.0, "tokens": [[1] * 16, [2] * 12 + [3] * 4]}
    (row,) = table({**first, "CUSTOM": {str(workload): parted}}, [workload])
    assert row["CUSTOM"]["speedup"] == 1.5
    assert row["CUSTOM"]["equal_tokens"] == round(28 / 32, 4)
    assert row["CUSTOM"]["parted_in_steps"] == [12]
