"""Places at which prompts part, against what every pair of prompts says."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trunkattn.analysis.reading.tokens import chained
from trunkattn.analysis.spoilers.partings import partings

PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=14)


@given(PROMPTS, st.integers(1, 4))
def test_partings_are_the_prefixes_with_several_next_blocks(prompts: list[list[int]], least: int) -> None:
    by_prefix: dict[tuple[int, ...], list[int]] = {}
    for position, prompt in enumerate(prompts):
        for depth in range(len(prompt)):
            by_prefix.setdefault(tuple(prompt[:depth]), []).append(position)
    expected = {}
    for prefix, positions in by_prefix.items():
        next_blocks = Counter(prompts[position][len(prefix)] for position in positions)
        if len(positions) - max(next_blocks.values()) >= least:
            expected[prefix] = set(positions)
    found = partings([chained(np.array(prompt, dtype=np.int64)) for prompt in prompts], least)
    assert {tuple(prompts[it.members[0]][: it.depth]): set(it.members.tolist()) for it in found} == expected
    assert [it.depth for it in found] == sorted(it.depth for it in found)
    for it in found:
        next_of = {int(member): prompts[member][it.depth] for member in it.members}
        pairs = {(int(child), next_of[int(member)]) for child, member in zip(it.children, it.members, strict=True)}
        assert len(pairs) == len({child for child, _ in pairs}) == len({block for _, block in pairs})


def test_equal_prompts_do_not_part() -> None:
    assert partings([np.array([1, 2])] * 9, 1) == []
    assert partings([], 1) == []
