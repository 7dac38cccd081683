"""A layer in training of any kind: a batch, packed sequences or a prefix tree, with any features."""

from typing import Any

import torch
from hypothesis import strategies as st

from trunkattn.planner.work_list import UNLIMITED

from .training_cases import TrainingCase, tree_case
from .tree_cases import trees


@st.composite
def any_case(draw: st.DrawFn, longest: int, dtypes: tuple[torch.dtype, ...]) -> TrainingCase:
    """longest: tokens of a sequence, or of a segment of a tree."""
    options: dict[str, Any] = {
        "heads": draw(st.sampled_from([(1, 1), (4, 2), (3, 1), (7, 1)])),
        "head_dim": draw(st.sampled_from([1, 8, 16, 20, 40])),
        "head_dim_v": draw(st.none() | st.sampled_from([1, 8, 16, 33])),
        "dtype": draw(st.sampled_from(dtypes)),
        "sm_scale": draw(st.none() | st.floats(0.01, 2)),
        "sliding_window": draw(st.none() | st.sampled_from([1, 2, 9, 16, 30, UNLIMITED])),
        "soft_cap": draw(st.none() | st.floats(0.5, 30)),
        "has_sinks": draw(st.booleans()),
    }
    kind = draw(st.sampled_from(["batch", "packed", "tree"]))
    if kind == "tree":
        return tree_case(draw(trees(longest)), **options)
    length = st.integers(0, longest)
    lengths = draw(st.lists(st.tuples(length, length), min_size=1, max_size=5))
    if kind == "batch":
        return TrainingCase((lengths[0],) * min(2, len(lengths)), False, draw(st.booleans()), **options)
    return TrainingCase(tuple(lengths), True, draw(st.booleans()), padding=draw(st.integers(0, 20)), **options)
