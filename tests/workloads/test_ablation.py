"""ablation.py and tile_lists.py on a CPU: what `ncu` printed, planned bytes, arguments."""

import numpy as np
import pytest
import torch

from benchmarks.kernels.ablation import METRICS, dram_bytes
from benchmarks.kernels.decode import Case
from benchmarks.kernels.tile_lists import PlannedBytes, planned_bytes
from benchmarks.workloads import parse_tree, tree_batch
from trunkattn.planner.work_list import TileList

from .scripts import refusal

pytestmark = pytest.mark.slow

HEADER = '"ID","Process ID","Kernel Name","Stream","Metric Name","Metric Unit","Metric Value"'
FLUSH = "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float> >(T3)"


def printed(*kernels: tuple[str, int, int]) -> str:
    """As `ncu --csv` does it. kernels: name, bytes read, bytes written."""
    lines = ["==PROF== Connected to process 7 (/usr/bin/python3)", "==PROF== Disconnected from process 7", HEADER]
    for number, (name, *counts) in enumerate(kernels):
        for metric, count in zip(METRICS, counts, strict=True):
            lines.append(f'"{number}","7","{name}","7","{metric}","byte","{count:,}"')
    return "\n".join(lines) + "\n"


def test_bytes_are_summed_over_the_kernels_between_two_flushes() -> None:
    text = printed(
        (FLUSH, 400_000_000, 5), ("decode_kernel", 34_000_000, 100), ("merge_kernel", 200, 30), (FLUSH, 400_000_000, 7),
        ("hopper_decode_kernel", 1_000, 2_000), (FLUSH, 400_000_000, 9),
    )  # fmt: skip
    assert dram_bytes(text) == [{"read": 34_000_200, "written": 137}, {"read": 1_000, "written": 2_009}]


def test_several_flushes_in_a_row_are_one() -> None:
    text = printed(
        (FLUSH, 8, 1), ("decode_kernel", 3, 4), (FLUSH, 8, 10), (FLUSH, 8, 20), ("decode_kernel", 5, 6), (FLUSH, 8, 0)
    )
    assert dram_bytes(text) == [{"read": 3, "written": 34}, {"read": 5, "written": 6}]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM\n", "ncu printed no table, but '==ERROR== ERR_NVGPUCTRPERM'"),
        (printed(("decode_kernel", 3, 4)), "decode_kernel comes first: expected reduce_kernel"),
        (printed((FLUSH, 8, 1)).replace('"byte"', '"Mbyte"'), "in 'Mbyte': expected .* in byte"),
        (printed((FLUSH, 8, 1)).replace(METRICS[0], "dram__cycles"), "dram__cycles in 'byte': expected"),
    ],
)
def test_anything_else_is_refused(text: str, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        dram_bytes(text)


def test_planned_bytes() -> None:
    """Two items read 16 tokens both, then 5 of the next page each; the second segment of the first is a filler."""
    batch = tree_batch(parse_tree("1,2_16,5"), 16)
    q, kv = torch.zeros(2, 8, 32, dtype=torch.float16), torch.zeros(3, 16, 2, 32, dtype=torch.float16)
    items = np.array([[0, 1, 3, 0, 1], [3, 4, 5, 1, 2]], np.int32)
    segments = [[0, 1 << 8 | 16 << 16, 0], [0, 0, 0], [16, 1 << 8 | 5 << 16, 16]]
    segments += [[0, 1 << 8 | 16 << 16, 0], [32, 1 << 8 | 5 << 16, 16]]
    none = np.empty((0, 2), np.int32)
    slots, counts = np.array([0, -1], np.int32), np.array([0, 2, 2], np.int32)
    queries = np.array([0, 1], np.int32)
    listed = TileList(items, np.array(segments, np.int32), queries, slots, none, counts, none[:, 0], none, 1, False)
    token = 2 * 2 * 32 * 2  # keys and values, heads, head_dim, bytes
    assert planned_bytes(Case(batch, q, [(kv, kv)], []), listed) == PlannedBytes(
        kv_memory=(16 + 5 + 5) * token, kv_tiles=2 * (16 + 5) * token, partials=2 * 8 * 33 * 4, q_and_out=2 * 2 * 8 * 64
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--trees", "1,2"], "argument --trees: tree '1,2': expected a tree such as '1,4,256_32,256,32'"),
        (
            ["--trees", "1,2_17,5"],
            "argument --trees: page_size=16: expected a divisor of the tokens of every shared level",
        ),
        (["--heads", "3/2"], "argument --heads: invalid choice: '3/2'"),
    ],
)
def test_bad_arguments_are_refused(arguments: list[str], expected: str) -> None:
    assert expected in refusal("benchmarks.kernels.ablation", arguments)
