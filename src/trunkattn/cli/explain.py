"""`trunkattn explain`: one batch, and what each packing policy makes of it."""

import json
import math
import re
import zipfile
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from trunkattn.analysis.pricing.memory import check_cards
from trunkattn.analysis.pricing.model_shape import model_shape
from trunkattn.analysis.trees import parse_tree, tree_batch
from trunkattn.cli.options.analysis import ExplainOptions
from trunkattn.cli.options.from_dataclass import reported_by_option
from trunkattn.cli.streams import STANDARD_STREAM, check_writable, print_json, write
from trunkattn.gpu.cards import card_named
from trunkattn.interrupts import ends_at_once
from trunkattn.numerics import MAX_INT32
from trunkattn.validate import expanded

TREE: Final = re.compile(r"[0-9, ]+_[0-9, ]+")
FIELDS: Final = ("block_table", "seq_lens", "page_size")
EXPECTED: Final = ", ".join(map(json.dumps, FIELDS))  # in quotes, because an option has the name of one
DEFAULT_PAGE_SIZE: Final = 16
Tables = tuple[NDArray[Any], NDArray[Any], int]


def run_explain(options: ExplainOptions) -> None:
    """Checks the options, plans the batch with every policy, and prints what that gives."""
    with reported_by_option(ExplainOptions):
        shape, card = model_shape(options.model), card_named(options.card)
        check_cards(shape, options.tensor_parallel)
        check_writable("svg_file", options.svg_file, {expanded(options.batch): "BATCH"})
        if options.as_json and options.svg_file == STANDARD_STREAM:
            raise ValueError("svg_file='-': expected a file, because --json prints to standard output")
        block_table, seq_lens, page_size = read_batch(options.batch, options.page_size)
    with reported_by_option(ExplainOptions), ends_at_once():
        from trunkattn.analysis.explain import explain
        from trunkattn.analysis.pricing.prices import Prices
        from trunkattn.analysis.reports.explain_report import explanation_dict, forest_svg, print_explanation

        prices = Prices(shape, card, page_size, options.tensor_parallel, options.kv_cache_dtype)
        explanation = explain((block_table, seq_lens), prices)
    if options.svg_file is not None:
        write(options.svg_file, forest_svg(explanation, prices))
        if options.svg_file == STANDARD_STREAM:
            return
    if options.as_json:
        print_json(explanation_dict(explanation, prices))
    else:
        print_explanation(explanation, prices, Console())


def read_batch(batch: str, page_size: int | None) -> Tables:
    """Block table, lengths and page size of a tree or of a file.

    Args:
        batch: a tree, or the path of a .json or .npz file.
        page_size: tokens of a page; None: the file's; of a tree, the largest up to 16 that its shared levels fill.

    Raises:
        ValueError: `batch=...: expected ...`.
    """
    if TREE.fullmatch(batch):
        try:
            tree = parse_tree(batch)
        except ValueError as error:
            raise ValueError(f"batch={batch!r}: {error}") from error
        made = tree_batch(tree, page_size or math.gcd(DEFAULT_PAGE_SIZE, *tree.tokens[:-1]))
        return made.block_table, made.seq_lens, made.page_size
    path = expanded(batch)
    fields = _fields(path)
    given = {"page_size": page_size, **{name: value for name, value in fields.items() if value is not None}}
    missing = [name for name in FIELDS if given.get(name) is None]
    if missing:
        raise ValueError(
            f"batch={batch!r}: there is no {' and no '.join(map(json.dumps, missing))}; expected {EXPECTED}"
        )
    size = _page_size(batch, given["page_size"])
    if page_size is not None and size != page_size:
        raise ValueError(f"page_size={page_size}: expected {size}, which the file says")
    lengths = _integers(batch, "seq_lens", given["seq_lens"])
    return _table(batch, given["block_table"], lengths, size), lengths.astype(np.int32), size


def _page_size(batch: str, value: Any) -> int:
    size = np.array(value)
    if size.shape not in ((), (1,)) or size.dtype.kind not in "iu" or size.item() < 1:
        raise ValueError(f'batch={batch!r}: "page_size" is not one integer of at least 1')
    return int(size.item())


def _table(batch: str, listed: Any, lengths: NDArray[np.int64], page_size: int) -> NDArray[np.int32]:
    """The pages that each row needs for its length. What pads a row after them is not looked at."""
    if not isinstance(listed, list | np.ndarray) or not np.iterable(listed) or len(listed) == 0:
        raise ValueError(f'batch={batch!r}: "block_table" is not a list of rows')
    if len(lengths) != len(listed):
        raise ValueError(
            f'batch={batch!r}: "seq_lens" has {len(lengths)} entries; expected {len(listed)}, one for each row of '
            f'"block_table"'
        )
    if lengths.min() < 1:
        raise ValueError(f'batch={batch!r}: "seq_lens" holds a 0; expected at least 1 token in each row')
    needed, rows = (-(-lengths // page_size)).tolist(), []
    for number, (row, count) in enumerate(zip(listed, needed, strict=True)):
        pages = _integers(batch, "block_table", row[:count] if isinstance(row, list | np.ndarray) else row)
        if len(pages) < count:
            raise ValueError(
                f'batch={batch!r}: row {number} of "block_table" has {len(pages)} pages of {page_size} tokens; '
                f"expected enough for its length, {lengths[number]}"
            )
        rows.append(pages)
    table = np.zeros((len(rows), max(needed)), np.int32)  # as long as the longest row, which is there
    for number, pages in enumerate(rows):
        table[number, : len(pages)] = pages
    return table


def _fields(path: Path) -> dict[str, Any]:
    """The fields of a file."""
    expected = "expected a tree such as 1,4,64_1024,512,128, or a .json or .npz file"
    if not path.exists() or path.is_dir():  # a pipe is as good as a file
        raise ValueError(f"batch={str(path)!r}: there is no such file; {expected}")
    try:
        if path.suffix == ".npz":
            with zipfile.ZipFile(path), np.load(path, allow_pickle=False) as arrays:
                return dict(arrays)
        fields = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, EOFError, ValueError, RecursionError, zipfile.BadZipFile) as error:
        raise ValueError(f"batch={str(path)!r}: it cannot be read ({error}); {expected}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"batch={str(path)!r}: it holds no JSON object; expected {EXPECTED}")
    return fields


def _integers(batch: str, name: str, values: Any) -> NDArray[np.int64]:
    """A list of integers that fit into int32."""
    try:
        array = np.array(values)
    except ValueError:  # lists of several lengths
        array = np.array("")
    is_right = array.ndim == 1 and (array.size == 0 or array.dtype.kind in "iu")
    if not is_right or not all(0 <= value <= MAX_INT32 for value in (array.min(initial=0), array.max(initial=0))):
        raise ValueError(f'batch={batch!r}: "{name}" is not a list of integers from 0 to {MAX_INT32}')
    return array.astype(np.int64)
