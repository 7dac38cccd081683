"""Log-probabilities side by side: entries as lists have them, and nothing that Python looks at for garbage."""

import copy
import gc
import pickle
from types import SimpleNamespace

import pytest

from trunkattn.engine.answers.answers import RequestAnswers
from trunkattn.engine.answers.flat_logprobs import FlatLogprobs
from trunkattn.engine.answers.token_bytes import TokenBytes
from trunkattn.engine.outputs import Logprob
from trunkattn.engine.sampling.sampler import TokenLogprobs
from trunkattn.engine.sampling_params import SamplingParams
from trunkattn.engine.scheduling.request import Request

WRITES = TokenBytes(SimpleNamespace(decode=lambda ids: chr(97 + ids[0])))
FIRST = TokenLogprobs([3, 5, 3], [-0.5, -0.25, -0.5], [2, 1, 2])  # the token is among the most likely ones
SECOND = TokenLogprobs([7], [-2.0], [9])


@pytest.fixture
def row() -> FlatLogprobs:
    found = FlatLogprobs(WRITES)
    for one in (None, FIRST, SECOND):
        found.append(one)
    return found


def test_it_reads_as_a_list_of_entries(row: FlatLogprobs) -> None:
    first = {3: Logprob(-0.5, 2, "d", b"d"), 5: Logprob(-0.25, 1, "f", b"f")}
    expected = [None, first, {7: Logprob(-2.0, 9, "h", b"h")}]
    assert list(row) == expected and row == expected and len(row) == 3
    assert row[1:] == expected[1:] and row[-1] == expected[-1] and row[::-1] == expected[::-1]
    assert list(row[1]) == [3, 5], "the token itself comes first"
    assert row != expected[1:] and row != 3 and row[:0] == []
    assert repr(row) == repr(expected)
    with pytest.raises(IndexError):
        row[3]


def test_what_is_added_later_changes_no_output(row: FlatLogprobs) -> None:
    before, length = row.so_far(), len(row)
    row.append(SECOND)
    assert len(before) == length and before == row[:length]
    with pytest.raises(IndexError):
        before[length]
    assert not FlatLogprobs(WRITES)


def test_a_copy_is_a_list(row: FlatLogprobs) -> None:
    assert copy.deepcopy(row) == pickle.loads(pickle.dumps(row)) == list(row)


def test_a_long_prompt_makes_nothing_that_is_searched_for_garbage() -> None:
    places, likely = 2000, 20
    params = SamplingParams(prompt_logprobs=likely, logprobs=likely, max_tokens=4)
    found = [TokenLogprobs([1, *range(likely)], [-1.0] * (likely + 1), [1, *range(1, likely + 1)])] * places
    made = []
    for _ in range(3):
        request = Request("0", [1] * (places + 1), places + 1, params, 4)
        answers = RequestAnswers("0", None, [request], None, WRITES)
        gc.collect()
        before = len(gc.get_objects())
        answers.add_prompt_logprobs(found)
        output = answers.output()
        assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == places + 1
        made.append(len(gc.get_objects()) - before)
    assert min(made) < 100, "other threads of the process make some too"
