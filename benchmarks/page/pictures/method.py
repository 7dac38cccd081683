"""The pictures of docs/how-it-works: what the method does, drawn.

They explain and measure nothing: the times in `cost_model` are those of the formulas on that page.
"""

import math
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Final

from benchmarks.page.pictures.chart import Axis, Curve, curves
from benchmarks.page.pictures.drawing import LINE, NORMAL, SMALL, WIDTH, Drawing

ROWS: Final = ((7, 3, 9, 1, 20), (7, 3, 9, 1, 21), (7, 3, 9, 1, 22), (7, 3, 5, 6, 23), (7, 3, 5, 6, 24), (7, 3, 30))
SHADE_OF_PAGE: Final = MappingProxyType({7: "trunk", 3: "trunk", 9: "left", 1: "left", 5: "right", 6: "right"})


def overview() -> Drawing:
    """The way of a step, from the tables to the output."""
    drawing = Drawing(WIDTH, 430, "A step: block table, prefix forest, tiles, work list, attention, output")
    drawing.heading(10, 22, "Once per step: plan")
    steps = (
        ("pale", "1  block table", "page ids of each request"),
        ("trunk", "prefix forest", "what requests share, as a tree"),
        ("left", "2  tiles or packs", "which queries read together"),
        ("right", "3  cheapest candidate", "by predicted time"),
        ("own", "4  work list", "int32 arrays: all that a kernel reads"),
    )
    for number, (shade, name, meaning) in enumerate(steps):
        y = 44 + 46 * number
        drawing.box(10, y, 220, 34, shade, name)
        drawing.text(246, y + 17, meaning, shade="soft")
        if number:
            drawing.arrow((120, y - 12), (120, y - 1))
    drawing.heading(10, 296, "Once per layer: run")
    drawing.box(10, 318, 170, 54, "pale", "q, K and V cache", "of the layer")
    drawing.box(215, 318, 170, 54, "trunk", "5  attention", "item by item")
    drawing.box(420, 318, 170, 54, "left", "5  merge", "by log-sum-exp")
    drawing.arrow((182, 345), (213, 345))
    drawing.arrow((387, 345), (418, 345))
    drawing.line([(120, 264), (120, 278), (300, 278), (300, 316)], "soft", width=2, arrow=True)
    drawing.note(
        10, 396, 580, "The list is made once and every layer reads it. Only queries with several items are merged."
    )
    return drawing


def prefix_forest() -> Drawing:
    drawing = Drawing(WIDTH, 590, "A block table of six requests, and the prefix forest that the planner reads off it")
    drawing.heading(10, 22, "Block table: page ids of each request")
    for row, pages in enumerate(ROWS):
        y = 46 + 34 * row
        drawing.text(10, y + 15, f"request {row}", shade="soft")
        for column, page in enumerate(pages):
            drawing.box(110 + 66 * column, y, 64, 32, SHADE_OF_PAGE.get(page, "own"), str(page))
    drawing.note(
        462, 60, 136, "Two rows share a node where their page ids agree in every column up to there.", size=SMALL
    )
    drawing.arrow((270, 254), (270, 280))
    drawing.heading(10, 300, "Prefix forest: a node for each shared stretch")
    drawing.box(10, 322, 150, 202, "trunk", "pages 7, 3", "", "shared by", "requests 0 to 5")
    drawing.box(162, 322, 160, 100, "left", "pages 9, 1", "", "requests 0, 1, 2")
    drawing.box(162, 424, 160, 66, "right", "pages 5, 6", "requests 3, 4")
    for row in range(5):
        drawing.box(324, 322 + 34 * row, 110, 32, "own", f"page {20 + row}")
    drawing.box(162, 492, 110, 32, "own", "page 30")
    drawing.note(450, 376, 148, "Leaves: what each request has for itself.", size=SMALL)
    named, read = sum(map(len, ROWS)), len({page for pages in ROWS for page in pages})
    drawing.text(10, 556, f"The table names {named} pages. A step reads {read}.", bold=True)
    return drawing


def row_tiles() -> Drawing:
    drawing = Drawing(WIDTH, 760, "Packs with a merge, and row tiles without one")
    drawing.heading(10, 22, "Packs: one item per node, then a merge")
    drawing.box(88, 44, 150, 254, "trunk", "item 0", "read once")
    drawing.box(240, 44, 140, 126, "left", "item 1", "read once")
    drawing.box(240, 172, 140, 126, "right", "item 2", "read once")
    for row in range(8):
        y = 44 + 32 * row
        drawing.text(78, y + 15, f"query {row}", anchor="end", shade="soft", size=SMALL)
        drawing.box(382, y, 90, 30, "own", f"item {3 + row}", size=SMALL)
    drawing.note(486, 100, 112, "Each query has 3 partial results. They are written, read and merged.", size=SMALL)
    drawing.heading(10, 350, "Row tiles: neighbouring queries, whole paths")
    for tile, shade in enumerate(("left", "right")):
        y = 372 + 156 * tile
        drawing.rectangle(84, y, 452, 142, "pale", border="soft")
        drawing.box(92, y + 8, 150, 126, "trunk", "trunk", "for 4 rows")
        drawing.box(244, y + 8, 136, 126, shade, "branch", "for 4 rows")
        for row in range(4):
            drawing.text(78, y + 24 + 32 * row, f"query {4 * tile + row}", anchor="end", shade="soft", size=SMALL)
            for column in range(4):
                drawing.rectangle(
                    382 + 37 * column, y + 8 + 32 * row, 35, 30, "own" if row == column else "card", border="pale"
                )
        drawing.text(542, y + 71, f"tile {tile}", size=SMALL)
    end = drawing.note(
        10, 704, 580, "A tile reads its path once and finishes its queries: nothing is merged. The suffixes are a "
        "block-diagonal mask. Tile 1 finds the trunk in the L2 cache."
    )  # fmt: skip
    drawing.height = end + 4
    return drawing


def work_list() -> Drawing:
    drawing = Drawing(WIDTH, 640, "A work list: segments, items, queries and their partial slots")
    drawing.heading(10, 22, "Segments: stretches of KV within a page")
    segments = (
        ("trunk", "page 7", "16 keys", "rows 0-3"), ("trunk", "page 3", "16 keys", "rows 0-3"),
        ("own", "page 20", "5 keys", "row 0"), ("own", "page 21", "9 keys", "row 1"),
        ("trunk", "page 7", "16 keys", "rows 0-1"), ("trunk", "page 3", "16 keys", "rows 0-1"),
        ("own", "page 24", "2 keys", "row 0"),
    )  # fmt: skip
    step = 83
    for index, (shade, *lines) in enumerate(segments):
        drawing.box(10 + step * index, 44, step - 2, 70, shade, *lines, size=SMALL)
        drawing.text(10 + step * (index + 0.5), 128, str(index), anchor="middle", shade="soft", size=SMALL)
    for name, first, end in (("item 0", 0, 4), ("item 1", 4, 6), ("item 2", 6, 7)):
        x, until = 12 + step * first, 6 + step * end
        drawing.line([(x, 144), (x, 150), (until, 150), (until, 144)], "soft")
        drawing.text((x + until) / 2, 166, name, anchor="middle")
    drawing.heading(10, 214, "Items: a tile of query rows each, heaviest first")
    heads = (("first", "segment"), ("seen by all", "until"), ("end", ""), ("first", "query"), ("end", ""))
    for column, words in enumerate(heads):
        for number, word in enumerate(words):
            x, y = 130 + 102 * column, 242 + 19 * number
            drawing.text(x, y, word, anchor="middle", shade="soft", size=SMALL)
    for item, values in enumerate(((0, 2, 4, 0, 4), (4, 6, 6, 4, 6), (6, 7, 7, 6, 7))):
        y = 278 + 36 * item
        drawing.text(10, y + 16, f"item {item}", shade="soft")
        for column, value in enumerate(values):
            drawing.box(80 + 102 * column, y, 100, 32, "pale", str(value))
    drawing.heading(10, 418, "Queries, and where their results go")
    drawing.text(10, 456, "query", shade="soft")
    drawing.text(10, 492, "result", shade="soft")
    for column, (query, slot) in enumerate(zip("0123455", ["out"] * 5 + ["slot 0", "slot 1"], strict=True)):
        drawing.box(80 + 73 * column, 440, 71, 32, "pale", query)
        drawing.box(80 + 73 * column, 476, 71, 32, "pale" if slot == "out" else "own", slot)
    bottom = drawing.note(
        10, 540, 580, "An item names its segments and its queries, and a kernel needs nothing else. Query 5 has its "
        "keys in two items: each writes a partial result into a slot, and a merge adds them up by their log-sum-exps."
    )  # fmt: skip
    drawing.height = bottom + 4
    return drawing


def cost_model() -> Drawing:
    """Llama-3-8B's heads on a card of 3 TB/s and 700 TFLOP/s: 4,096 shared and 128 private tokens."""
    shared, private, head_bytes, flops_per_pair, launches = 4096, 128, 8 * 2 * 128 * 2, 32 * 4 * 128, 5.0
    requests = [2**power for power in range(9)]
    own = [n * (shared + private) * head_bytes / 3.0e6 for n in requests]
    once = [(shared + n * private) * head_bytes / 3.0e6 for n in requests]
    rows = [-(-4 * n // 64) * 64 / 4 for n in requests]  # query tokens that tiles of 64 rows are filled up to
    products = [n * (shared + 16 * private) * flops_per_pair / 700e6 for n in rows]  # suffixes: for 16 requests each
    chosen = [max(pair) + launches for pair in zip(once, products, strict=True)]
    found = (
        Curve("memory, if each request reads its own prompt", "other", own),
        Curve("memory, the prompt read once", "trunk", once),
        Curve("arithmetic of tiles with 64 rows, padding included", "own", products),
        Curve("predicted: the larger of both, and 5 µs of launches", "ink", chosen, dashed=True),
    )
    return curves(
        "Time of a layer, µs, by the formulas on this page",
        found,
        Axis([math.log2(n) for n in requests], [str(n) for n in requests], "requests that share 4,096 tokens"),
        (2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000),
        "Llama-3-8B's heads, 128 tokens per request, 3 TB/s and 700 TFLOP/s. A single request shares nothing: its "
        "prediction lies above both curves of memory by the 5 µs of launches.",
    )


def planning_on_the_device() -> Drawing:
    drawing = Drawing(WIDTH, 480, "Two timelines: planned on the host, and planned on the GPU")
    drawing.heading(10, 22, "Planned on the host: the GPU waits")
    _lane(
        drawing,
        44,
        "host",
        ((0, 104, "pale", "copy tables"), (106, 150, "own", "make the plan"), (258, 70, "pale", "upload")),
    )
    _lane(drawing, 84, "GPU", ((330, 200, "trunk", "layers of this step"),))
    drawing.text(60 + 165, 101, "idle", anchor="middle", shade="soft")
    drawing.arrow((388, 64), (400, 83))
    drawing.heading(10, 162, "Planned on the GPU: one CUDA graph, no wait")
    _lane(drawing, 184, "host", ((0, 80, "pale", "launch"), (82, 448, "card", "free: schedules the next step")))
    stages = [(20 + 30 * number, 28, "own", str(number + 1)) for number in range(7)]
    _lane(drawing, 224, "GPU", (*stages, (230, 200, "trunk", "layers of this step")))
    drawing.arrow((94, 219), (94, 223))
    names = (
        "hash: equal prefixes get equal hashes", "parent: the earlier row that shares most",
        "entries: queries in the order of the forest", "tiles: the segments of every tile",
        "choice: the predicted time of every tiling", "items: the items of the fastest, and their order",
        "lists: the work list, in arrays of fixed size",
    )  # fmt: skip
    for number, name in enumerate(names):
        y = 290 + 27 * number
        drawing.box(60, y - 11, 24, 22, "own", str(number + 1), size=SMALL)
        drawing.text(96, y, name)
    return drawing


def _lane(drawing: Drawing, y: float, name: str, boxes: Sequence[tuple[float, float, str, str]]) -> None:
    """A row of a timeline. boxes: begin, width, shade and text of each."""
    drawing.text(10, y + 17, name, shade="soft")
    for begin, width, shade, text in boxes:
        drawing.box(60 + begin, y, width, 34, shade, text, border="rule" if shade == "card" else "card")


def hopper_kernels() -> Drawing:
    drawing = Drawing(WIDTH, 640, "Warp specialization: producers load, a pipeline holds, consumers compute")
    drawing.heading(10, 22, "Producers and consumers")
    drawing.box(10, 44, 150, 84, "left", "producer warps", "load K and V", "by TMA")
    drawing.box(225, 44, 150, 84, "pale", "stages", "in shared", "memory")
    drawing.box(440, 44, 150, 84, "trunk", "consumer warps", "multiply and", "take softmax")
    for start, name in ((162, "fill"), (377, "read")):
        drawing.arrow((start, 66), (start + 61, 66), "ink")
        drawing.text(start + 30, 54, name, anchor="middle", size=SMALL)
        drawing.arrow((start + 61, 106), (start, 106), "soft")
    drawing.text(192, 122, "empty", anchor="middle", size=SMALL, shade="soft")
    drawing.text(407, 122, "release", anchor="middle", size=SMALL, shade="soft")
    end = drawing.note(
        10, 160, 580, "A full barrier says that a stage has arrived, an empty one that its last reader has released "
        "it. Producers run ahead as far as there are stages."
    )  # fmt: skip
    top = end + 22
    drawing.heading(10, top, "Time: one colour for each block of keys")
    lanes = ("load K", "load V", "tensor cores", "softmax")
    for number, name in enumerate(lanes):
        drawing.text(10, top + 39 + 40 * number, name, shade="soft")
    shades, unit, half = ("trunk", "left", "right", "own"), 120, 58
    for block, shade in enumerate(shades):
        x = 118 + unit * block
        drawing.box(x, top + 22, half, 34, shade, f"K{block}")
        if x + unit < WIDTH - half:
            drawing.box(x + half + 2, top + 62, half, 34, shade, f"V{block}")
            drawing.box(x + half + 2, top + 102, half, 34, shade, f"Q·K{block}")
            drawing.box(x + unit, top + 142, half, 34, shade, str(block))
        if block >= 2:
            drawing.box(x, top + 102, half, 34, shades[block - 2], f"P·V{block - 2}")
    end = drawing.note(
        10, top + 206, 580, "A block is loaded, multiplied with the queries and put through the softmax. While its "
        "softmax runs, the tensor cores add the values of the block before. Two such CTAs share an SM."
    )  # fmt: skip
    drawing.height = end + 4
    return drawing


def merge() -> Drawing:
    drawing = Drawing(WIDTH, 330, "Two partial results of a query, added up by their log-sum-exps")
    drawing.heading(10, 22, "A query whose keys lie in two items")
    drawing.box(10, 44, 270, 40, "trunk", "item 0: keys of the trunk")
    drawing.box(320, 44, 270, 40, "own", "item 1: keys of its leaf")
    drawing.box(10, 118, 270, 40, "pale", "o₀ and lse₀")
    drawing.box(320, 118, 270, 40, "pale", "o₁ and lse₁")
    drawing.box(90, 212, 420, 46, "left", "out = w · o₀ + (1 - w) · o₁")
    drawing.arrow((145, 86), (145, 116))
    drawing.arrow((455, 86), (455, 116))
    drawing.arrow((145, 160), (220, 210))
    drawing.arrow((455, 160), (380, 210))
    drawing.text(300, 284, "w = exp(lse₀) / (exp(lse₀) + exp(lse₁))", anchor="middle")
    drawing.text(300, 312, "Exact, in any order and for any number of items.", anchor="middle", shade="soft")
    return drawing


def glossary() -> Drawing:
    drawing = Drawing(WIDTH, 520, "The words of this page on a picture of a forest, a tile and a segment")
    drawing.heading(10, 22, "A prefix forest")
    drawing.box(10, 44, 190, 134, "trunk", "node: the trunk", "", "shared by all")
    drawing.box(202, 44, 190, 88, "left", "node", "shared by some")
    for number in range(3):
        drawing.box(394 if number < 2 else 202, 44 + 45 * number, 120, 43, "own", "leaf")
    drawing.arrow((530, 66), (518, 66))
    drawing.note(534, 62, 62, "one of each request", size=SMALL)
    drawing.heading(10, 222, "A tile of two queries with two heads each")
    for row in range(4):
        y = 244 + 40 * row
        drawing.box(10, y, 150, 38, "pale", f"query {row // 2}, head {row % 2}", size=SMALL)
        for column in range(4):
            drawing.rectangle(170 + 76 * column, y, 74, 38, "trunk")
    for pair in range(2):
        for row in range(2):
            drawing.rectangle(474 + 58 * pair, 244 + 80 * pair + 40 * row, 56, 38, "own")
    drawing.line([(172, 412), (172, 420), (472, 420), (472, 412)], "soft")
    drawing.text(322, 438, "the trunk: 4 segments", anchor="middle", size=SMALL, shade="soft")
    drawing.text(530, 438, "leaves", anchor="middle", size=SMALL, shade="soft")
    drawing.note(
        10, 474, 580, "A tile has rows and reads segments of a page. It takes the keys in blocks, and every row keeps "
        "its own maximum, sum and output."
    )  # fmt: skip
    drawing.height = 474 + 2 * LINE * NORMAL + 4
    return drawing


def nano() -> Drawing:
    """The five functions of examples/nano.py on the example of its page."""
    drawing = Drawing(WIDTH, 420, "Nano: block table to tree, packs, items, attention and merge")
    drawing.heading(10, 22, "1. prefix_forest: 3 requests, pages of 4 tokens")
    rows = ((("0", "trunk"), ("1", "left"), ("2", "own")), (("0", "trunk"), ("1", "left"), ("3", "own")),
            (("0", "trunk"), ("4", "own"), ("5", "own")))  # fmt: skip
    for row, pages in enumerate(rows):
        y = 46 + 34 * row
        drawing.text(10, y + 16, f"request {row}", shade="soft")
        for column, (page, shade) in enumerate(pages):
            drawing.box(110 + 44 * column, y, 42, 32, shade, page)
    drawing.arrow((252, 96), (280, 96))
    drawing.box(290, 46, 90, 100, "trunk", "4 tokens", "shared", "by 3")
    drawing.box(382, 46, 108, 66, "left", "4 tokens", "shared by 2")
    drawing.box(492, 46, 72, 32, "own", "1 token", size=SMALL)
    drawing.box(492, 80, 84, 32, "own", "2 tokens", size=SMALL)
    drawing.box(382, 114, 208, 32, "own", "7 tokens")
    drawing.heading(10, 190, "2. pack, 3. work_items: what is read together")
    packs = ((4, "trunk", "q0, q1, q2"), (4, "left", "q0, q1"), (1, "own", "q0"), (2, "own", "q1"), (7, "own", "q2"))
    for item, (tokens, shade, queries) in enumerate(packs):
        drawing.box(10 + 116 * item, 212, 112, 54, shade, f"{tokens} token{'s' if tokens > 1 else ''}", queries)
        drawing.arrow((66 + 116 * item, 268), (66 + 116 * item, 294))
    drawing.heading(10, 316, "4. attend: a partial result for each item and query")
    drawing.text(10, 346, "5. merge: q0 has 3 partial results, q1 has 3 and q2 has 2.", shade="soft")
    read = sum(tokens for tokens, *_ in packs)
    drawing.text(10, 376, f"{read} tokens are read instead of 9 + 10 + 11 = 30.", bold=True)
    drawing.height = 400
    return drawing


METHOD: Final[tuple[Callable[[], Drawing], ...]] = (
    overview, prefix_forest, row_tiles, work_list, cost_model, planning_on_the_device, hopper_kernels, merge, glossary,
    nano,
)  # fmt: skip
