"""The picture of README.md: what the 32 customers of `trunkattn demo` share when they ask."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from benchmarks.page.pictures.drawing import SMALL, WIDTH, Drawing
from trunkattn.cli.demo.model import DEMO_MODEL, DEMO_MODEL_COMMAND, find_demo_model
from trunkattn.cli.demo.workload import DemoWorkload, load_demo
from trunkattn.engine.model.inspection import inspect_model
from trunkattn.engine.model.loading import load_tokenizer
from trunkattn.planner.prefix_forest import Forest, build_forest

_PAGE_SIZE: Final = 8  # the demo's
_ROW: Final = 11  # height of a customer
_TOP: Final = 44  # of the first customer
_EDGES: Final = (10.0, 160.0, 390.0, 590.0)  # where the trunk begins, the departments, the questions, and the end
_SHADES: Final = ("trunk", "left", "right")  # of shared nodes, by their depth


def demo_forest() -> Drawing:
    """The forest of the demo's prompts, and the KV that a step reads with sharing and without.

    Raises:
        FileNotFoundError: the demo's model is not installed, whose tokenizer counts.
    """
    workload = load_demo()
    prompts = _tokens(workload)
    forest, lens = _forest(prompts), [len(prompt) for prompt in prompts]
    drawing = Drawing(WIDTH, 0, "The prefix forest of 32 requests: what they share is read once")
    read, own = int((forest.token_end - forest.token_start).sum()), sum(lens)
    left = _EDGES[0]
    drawing.heading(left, 22, f"{len(prompts)} customers ask a shop: {1 - read / own:.0%} fewer KV bytes read")
    _draw_nodes(drawing, forest, [workload.departments[row] for row in forest.order])
    bottom = _TOP + _ROW * len(prompts)
    drawing.text(_EDGES[2], bottom + 18, "questions of their own", size=SMALL, shade="soft")
    drawing.text(left, bottom + 18, "what all share", size=SMALL, shade="soft")
    drawing.text(_EDGES[1], bottom + 18, "what half of them share", size=SMALL, shade="soft")
    drawing.text(left, bottom + 60, "KV tokens that a step reads in each layer", bold=True)
    bars = (("each request its own", own, "other"), ("shared tokens once", read, "trunk"))
    for number, (name, tokens, shade) in enumerate(bars):
        y, width = bottom + 80 + 34 * number, round(300 * tokens / own)
        drawing.text(left, y + 14, name)
        drawing.rectangle(200, y, width, 28, shade)
        drawing.text(208 + width, y + 14, f"{tokens:,}")
    drawing.height = bottom + 154
    return drawing


def _draw_nodes(drawing: Drawing, forest: Forest, departments: Sequence[str]) -> None:
    """Draws nodes as boxes, as high as their requests and as wide as their tokens by a scale for each depth."""
    ends = (0, int(forest.token_end[0]), int(forest.token_end[1]), int(forest.token_end.max()))
    for node in range(len(forest.parent)):
        start, end = int(forest.token_start[node]), int(forest.token_end[node])
        first, count = int(forest.row_start[node]), int(forest.row_end[node] - forest.row_start[node])
        x, until = np.interp((start, end), ends, _EDGES).round(1).tolist()
        shade = _SHADES[min(forest.depth[node], 2)] if count > 1 else "own"
        of = {departments[row] for row in range(first, first + count)}
        name = "the shop's guide" if node == 0 else min(of).lower() if count > 4 else ""
        lines = (name, "", f"{end - start:,} tokens", f"read once for {count}") if name else ()
        drawing.box(x, _TOP + _ROW * first, until - x, _ROW * count, shade, *lines)


def _tokens(workload: DemoWorkload) -> list[list[int]]:
    """Token ids of each conversation up to the first token of its answer."""
    model = find_demo_model()
    if model is None:
        raise FileNotFoundError(f"{DEMO_MODEL} is not installed, whose tokenizer counts: {DEMO_MODEL_COMMAND}")
    tokenizer = load_tokenizer(inspect_model(model).files)
    assert tokenizer is not None
    return [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in workload.chats
    ]


def _forest(prompts: Sequence[Sequence[int]]) -> Forest:
    """The prefix forest of a cache in which equal prefixes have equal pages."""
    lens = np.array([len(prompt) for prompt in prompts], np.int32)
    table = np.zeros((len(prompts), -(-int(lens.max()) // _PAGE_SIZE)), np.int32)
    pages: dict[tuple[int, ...], int] = {}
    for row, prompt in enumerate(prompts):
        for column in range(-(-len(prompt) // _PAGE_SIZE)):
            prefix = tuple(prompt[: (column + 1) * _PAGE_SIZE])
            is_full = len(prefix) == (column + 1) * _PAGE_SIZE
            table[row, column] = pages.setdefault(prefix if is_full else (*prefix, -1, row), len(pages))
    return Forest(*build_forest(table, lens, np.ones(len(prompts), np.int32), _PAGE_SIZE, 1))
