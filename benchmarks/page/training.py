"""Training: batches and prefix trees beside peers, and a step of a transformer's block."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from statistics import geometric_mean
from types import MappingProxyType
from typing import Any, Final

from benchmarks.kernels.flash_training import SHAPES, WIDE
from benchmarks.kernels.training_rows import of_one_process
from benchmarks.page.common import NOTICEABLE, Loss, Section, and_, card_of, exists, folded, load, sources, span, table
from benchmarks.workloads.training_trees import parse_training_tree
from trunkattn.training.spec import FEW_KEYS

CARDS: Final = ("h100", "h200")
OURS: Final = MappingProxyType(
    {
        "default": "TrunkAttention",
        "with_flash_attention_4": "with FlashAttention-4",
        "own": "own kernels",
        "deterministic": "own kernels, deterministic",
    }
)
OWN: Final = ("own", "deterministic")  # of OURS, what is kernels of this project
PEERS: Final = MappingProxyType(
    {
        "torch_flash": "PyTorch flash", "torch_cudnn": "PyTorch cuDNN", "flex_attention": "FlexAttention",
        "flash_attention_4": "FlashAttention-4", "flash_attention_3": "FlashAttention-3",
    }
)  # fmt: skip
NAMES: Final = MappingProxyType({**OURS, **PEERS})
TREE_PEERS: Final = MappingProxyType(
    {
        "cudnn_flex": "cuDNN flex", "flex_attention": "FlexAttention",
        "paths_flash_attention_4": "TRL's way, FlashAttention-4",
    }
)  # fmt: skip
FASTEST: Final = ("torch_cudnn", "flash_attention_4")  # what own kernels are held to
PARTS: Final = ("forward", "backward", "both")
FEWEST: Final = 4  # lengths of which a mean is shown
COMPARED: Final = (
    ("default", ("torch_cudnn",)),
    ("own", ("torch_flash",)),
    ("own", ("flex_attention",)),
    ("deterministic", ("torch_flash",)),
    ("deterministic", ("own",)),
    ("own", FASTEST),
    ("with_flash_attention_4", FASTEST),
)
MEMORY_WAYS: Final = ("default", "repeated")
PLAN_PARTS: Final = ("tree", "tables", "cudnn", "flex_attention")
Row = Mapping[str, Any]


def ms_of(row: Row, way: str, part: str = "both") -> float | None:
    """Milliseconds of a pass or of both; None: it was not measured."""
    cell = row.get(way, {})
    if part == "both" and "both" not in cell and "backward" in cell:
        return cell["forward"]["ms"] + cell["backward"]["ms"]
    return cell[part]["ms"] if part in cell else None


def speeds(rows: Iterable[Row], way: str, peers: Sequence[str], part: str = "both") -> list[float]:
    """The speed of a way over that of the fastest of some peers, of each row that has both of one process."""
    found = ([speed for peer in peers if (speed := speed_over(row, way, peer, part))] for row in rows)
    return [min(each) for each in found if each]


def speed_over(row: Row, way: str, peer: str, part: str) -> float | None:
    """The speed of a way over a peer's; None: no process measured both."""
    cells = of_one_process(row, way, peer)
    ours, theirs = ms_of(cells, way, part), ms_of(cells, peer, part)
    return theirs / ours if ours and theirs else None


def with_all(rows: Iterable[Row], peers: Sequence[str]) -> list[Row]:
    """The rows in which all of some peers were measured: elsewhere the fastest of them is not known."""
    return [row for row in rows if all(ms_of(row, peer) for peer in peers)]


def rows_of(name: str) -> list[Row]:
    """The rows of a result; none if there is no such result."""
    return load(name)["rows"] if exists(name) else []


def measured(rows: Iterable[Row]) -> str:
    """When rows were measured and what was added to them, and at which commits."""
    rows = list(rows)
    added = (cell["beside"] for row in rows for cell in row.values() if isinstance(cell, dict) and "beside" in cell)
    runs = (
        f"{row['date']} at {row['commit']}" + (f" {row['source']}" if "source" in row else "")
        for row in (*rows, *added)
    )
    return f"Measured {and_(dict.fromkeys(runs))}."


def named(card: str) -> list[Row]:
    """The rows of the batches of a card that the page shows one by one, beside its peers."""
    rows = {row["shape"]: row for row in rows_of(f"flash-training-{card}")}
    shown = (*SHAPES, *WIDE)
    return [rows[shape.name] for shape in shown if shape.name in rows and "torch_cudnn" in rows[shape.name]]


def over_cudnn() -> list[float]:
    """The speed of our own kernels over cuDNN's: forward, backward and both, of each batch, on an H100."""
    return [speed for part in PARTS for speed in speeds(named("h100"), "own", ("torch_cudnn",), part)]


def in_words() -> str:
    """What the README says of losses in training on an H100, in sentences."""
    rows, trees = named("h100"), rows_of("trees-h100")
    first = f"Our training kernels reach {span(over_cudnn())} of PyTorch's cuDNN's speed on an H100"
    if default := speeds(rows, "default", tuple(PEERS)):
        first += f", and `flash_attention` by default {span(default)} of the fastest peer's (both passes)"
    found = [f"{first}."]
    if by_tree := speeds(trees, "own", ("cudnn_flex",)):
        slower = span(1 / speed for speed in by_tree)
        found.append(f"Prefix trees take {slower}× cuDNN's time in our kernels.")
    elif by_flex := speeds(trees, "repeated", ("flex_attention",)):
        most = f"{1 / min(by_flex):.2f}× the time of FlexAttention on their tree"
        found.append(f"Sequences that repeat a prefix take up to {most} (`tree=` is not measured yet).")
    return " ".join(found)


def batches() -> Section | None:
    """Batches of one length beside peers."""
    cards = [card for card in CARDS if named(card)]
    if not cards:
        return None
    everywhere = [row for card in cards for row in named(card)]
    ways = {way: name for way, name in NAMES.items() if any(ms_of(row, way, "forward") for row in everywhere)}
    rows: list[list[object]] = []
    losses: list[Loss] = []
    for card in cards:
        rows += [[card.upper(), row["shape"], *(tflops(row, way) for way in ways), *ratios(row)] for row in named(card)]
        losses += losses_of(card, named(card))
    head = [
        "card",
        "batch × length, heads",
        *ways.values(),
        "user over cuDNN",
        "own over the faster, forward",
        "backward",
    ]
    text = f"""## Batches beside peers

TFLOP/s forward / backward, bf16, FlashAttention-3 forward only. "TrunkAttention" is what a user of `flash_attention`
gets: PyTorch's cuDNN, and our own kernels for the passes in which they are faster. "With FlashAttention-4" is what a
user gets who installs the extra `flash-attn-4`. "Own kernels" are what it takes elsewhere. Then ratios of speeds: what
a user gets over PyTorch's cuDNN, both passes; own kernels over the faster of cuDNN and FlashAttention-4, where both
were measured. Columns may be of several runs, each ratio is of one.
{measured(everywhere)}

{table(head, rows, 2)}

{sources("python -m benchmarks.kernels.flash_training", *(f"flash-training-{card}" for card in cards))}
"""
    return Section(text, losses)


def tflops(row: Row, way: str) -> str:
    """The speed of both passes, or of the one that there is."""
    cell = row.get(way, {})
    return " / ".join(f"{cell[part]['tflops']:.0f}" for part in PARTS[:2] if part in cell)


def ratios(row: Row) -> list[str]:
    """What a user gets over cuDNN, and own kernels over the faster of what they are held to, if all of it was
    measured."""
    found = [speeds([row], "default", ("torch_cudnn",))]
    found += [speeds(with_all([row], FASTEST), "own", FASTEST, part) for part in PARTS[:2]]
    return [f"{each[0]:.2f}" if each else "" for each in found]


def least(times: Sequence[float]) -> str:
    """The best case of a loss, if there are several."""
    return f"from {min(times):.2f}×" if f"{min(times):.2f}" != f"{max(times):.2f}" else ""


def losses_of(card: str, rows: Sequence[Row]) -> list[Loss]:
    """One loss for each peer that is faster somewhere: of what a user gets, if it was measured, and of own kernels."""
    found = []
    for way, name in (
        ("default", "training, what a user gets"),
        ("with_flash_attention_4", "training, with FlashAttention-4 installed"),
        ("own", "training in kernels of our own"),
    ):
        for peer in PEERS:
            parts = PARTS if peer != "flash_attention_3" else PARTS[:1]
            times = [1 / speed for part in parts for speed in speeds(rows, way, (peer,), part)]
            if times and max(times) > NOTICEABLE:
                where = f"{name}, {card.upper()}: {'forward' if len(parts) == 1 else 'forward, backward or both'}"
                found.append(Loss(where, PEERS[peer], max(times), least(times)))
    return found


def lengths() -> Section | None:
    """Geometric means over lengths of 512 to 16k tokens, 16k tokens in all."""
    names = [f"flash-training-{card}" for card in CARDS if exists(f"flash-training-{card}")]
    rows: list[list[object]] = []
    losses: list[Loss] = []
    for name in names:
        for (mask, heads), group in groupby(sorted(rows_of(name), key=kind_of), kind_of):
            found = list(group)
            for way, peers in COMPARED:
                parts = [speeds(with_all(found, peers), way, peers, part) for part in PARTS]
                if len(parts[-1]) < FEWEST:
                    continue
                than = "the faster of both" if len(peers) > 1 else NAMES[peers[0]]
                means = [geometric_mean(part) for part in parts]
                shown = [f"{mean:.2f}" for mean in (*means, min(parts[-1]))]
                rows.append([card_of(name), f"{mask} {heads}", OURS[way], than, len(parts[-1]), *shown])
                if 1 / min(means) > NOTICEABLE and peers[0] in PEERS and len(peers) == 1:
                    where = f"training, {card_of(name)}, {OURS[way]}, {mask} {heads}, all lengths, worst pass"
                    losses.append(Loss(where, than, 1 / min(means)))
    if not rows:
        return None
    head = ["card", "batches", "ours", "over", "lengths", *PARTS, "both, worst"]
    text = f"""## By length

Speed over a peer's in the same process: geometric means over lengths of 512 to 16,384 tokens, 16,384 in all. "The
faster of both" is the faster of PyTorch's cuDNN and FlashAttention-4.

{folded(f"{len(rows)} comparisons", table(head, rows, 4))}

{sources("python -m benchmarks.kernels.flash_training --grid", *names)}
"""
    return Section(text, losses)


def kind_of(row: Row) -> tuple[str, str]:
    """A row's mask, and its heads and head_dim."""
    mask, _, heads = row["shape"].split(" ", 2)
    return mask, heads


def now_own(rows: Iterable[Row]) -> str:
    """Names the trees that were measured in cuDNN and see so few keys that our own kernels compute them."""
    measured_there = (row["tree"] for row in rows if row.get("default", {}).get("kernel") == "cuDNN flex_attention")
    trees = {name: parse_training_tree(name) for name in measured_there}
    few = [name for name, tree in trees.items() if tree.work.pairs <= FEW_KEYS * tree.num_tokens]
    return f" For the trees {and_(few)} it is now our own kernels, which these rows do not show yet." if few else ""


def trees() -> Section | None:
    """Sequences that share prefixes, beside peers and beside the same sequences repeated."""
    names = [f"trees-{card}" for card in CARDS if exists(f"trees-{card}")]
    if not names:
        return None
    all_rows = [row for name in names for row in rows_of(name)]
    ours = {way: OURS[way] for way in ("default", *OWN)}
    ways = {**ours, **TREE_PEERS, "repeated": "repeated"}
    ways = {way: name for way, name in ways.items() if any(ms_of(row, way) for row in all_rows)}
    rows = [
        [card_of(name), row["tree"], *(passes(row, way) for way in ways), *gain(row), f"{row['work_ratio']:.2f}"]
        for name in names
        for row in rows_of(name)
    ]
    head = ["card", "tree", *ways.values(), "speed-up over repeated", "work saved"]
    heads = and_(dict.fromkeys(f"{row['heads']} heads of {row['head_dim']}" for row in all_rows))
    text = f"""## Prefix trees

Milliseconds forward + backward, {heads}, bf16. A tree is its levels from the root, each as
segments × their tokens. "TrunkAttention" is `flash_attention` with `tree=`, which is cuDNN's flex_attention where it is
installed.{now_own(all_rows)}
"cuDNN flex" is the same called directly; TRL's way gathers the path from the root to every segment. "Repeated" is
`flash_attention` of every sequence by itself, which computes a prefix for each of its branches. The last columns are
what a tree saves: measured, and counted as pairs of a query and a key. {measured(all_rows)}

{table(head, rows, 2)}
{plans(names)}
{sources("python -m benchmarks.kernels.trees", *names)}
"""
    return Section(text, [loss for name in names for loss in tree_losses(name)])


def passes(row: Row, way: str) -> str:
    """Milliseconds of both passes; nothing if they were not measured."""
    return f"{ms_of(row, way, 'forward'):.2f} + {ms_of(row, way, 'backward'):.2f}" if ms_of(row, way) else ""


def gain(row: Row) -> list[str]:
    """What `tree=` saves over repeated sequences."""
    return [f"{speed:.2f}×" for speed in speeds([row], "default", ("repeated",))] or [""]


def plans(names: Sequence[str]) -> str:
    """A table of memory and of a new tree's plan, if they were measured. names: of results."""
    planned = [(card_of(name), row) for name in names for row in rows_of(name) if "plan" in row]
    if not planned:
        return ""
    columns = ["`tree=`, MB", "repeated, MB", "tree", "its tables", "cuDNN's plan", "FlexAttention's mask"]
    cells: list[list[object]] = []
    for card, row in planned:
        memory = [row.get(way, {}).get("peak_mb") for way in MEMORY_WAYS]
        times = [row["plan"].get(part) for part in PLAN_PARTS]
        shown = [f"{megabytes:.0f}" if megabytes else "" for megabytes in memory]
        cells.append([card, row["tree"], *shown, *(f"{ms:.2f}" if ms is not None else "" for ms in times)])
    return f"""
Peak memory of both passes with their inputs; and what a new tree takes until it is ready, in milliseconds.

{table(["card", "tree", *columns], cells, 2)}
"""


def tree_losses(name: str) -> list[Loss]:
    """What is faster than `tree=`; while that is not measured, than repeated sequences."""
    rows, card = rows_of(name), card_of(name)
    ways: tuple[tuple[str, str], ...] = (
        ("default", f"a prefix tree by `tree=`, {card}"),
        ("own", f"a prefix tree in our own kernels, {card}"),
    )
    if not any(speeds(rows, way, tuple(TREE_PEERS)) for way, _ in ways):
        ways = (("repeated", f"training on repeated sequences instead of a tree, {card}"),)
    found = []
    for way, where in ways:
        for peer in TREE_PEERS:
            times = [1 / speed for speed in speeds(rows, way, (peer,))]
            if times and max(times) > NOTICEABLE:
                found.append(Loss(where, f"{TREE_PEERS[peer]} on the tree", max(times), least(times)))
    return found


def block() -> Section | None:
    """A training step of one block of a transformer."""
    names = [f"training-block-{card}" for card in CARDS if exists(f"training-block-{card}")]
    if not names:
        return None
    step = step_figures
    rows = [
        [card_of(name), row["tree"], *step(row, "tokens_per_s", "{:,.0f}"), *step(row, "peak_gb", "{:.1f}"),
         *block_gain(row), f"{row['token_ratio']:.2f}", f"{row['work_ratio']:.2f}"]
        for name in names
        for row in rows_of(name)
    ]  # fmt: skip
    head = ["card", "tree", "tree, tokens/s", "repeated, tokens/s", "tree, GB", "repeated, GB", "speed-up"]
    text = f"""## A whole training step

One block of Llama-3-8B's shape (norms, attention, MLP), forward and backward with gradients of all weights, bf16.
Tokens are those of all sequences, repeated ones included. Losses and gradients of both ways are equal within rounding.
The last columns say how many times more tokens the repeated sequences have, and how many times more work in attention.
{measured(row for name in names for row in rows_of(name))}

{table([*head, "tokens saved", "attention saved"], rows, 2)}

{sources("python -m benchmarks.kernels.training_block", *names)}
"""
    return Section(text, [])


def step_figures(row: Row, key: str, form: str) -> list[str]:
    """A figure of a tree's step and of the repeated sequences' one."""
    cells = (row["tree_step"], row["repeated_step"])
    return [form.format(cell[key]) if key in cell else "out of memory" for cell in cells]


def block_gain(row: Row) -> list[str]:
    """The speed-up of a tree's step."""
    times = [row[way].get("ms") for way in ("repeated_step", "tree_step")]
    return [f"{times[0] / times[1]:.2f}×" if all(times) else ""]


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def checks() -> Section | None:
    """Errors, peak memory, and runs whose bits are to repeat, if they were measured."""
    name = "flash-training-h100"
    found = load(name).get("checks", {}) if exists(name) else {}
    if "memory" not in found:
        return None
    rows: list[list[object]] = [
        [row["dtype"], row["result"], *(_ratio(row.get(f"{way}_over_plain")) for way in OWN)] for row in found["errors"]
    ]
    most = found["memory"][-1]
    megabytes = {way: f"{most[way] / 1e6:,.0f} MB" for way in ("own", "torch_flash", "torch_math")}
    runs = [f"{row['different']} of {row['runs']:,} over `{row['of']}`" for row in found.get("repeats", ())]
    differ = "With `deterministic=True`, runs whose output or gradients differ in any bit from those of the first run: "
    repeated = f"{differ}{and_(runs)}.\n\n" if runs else ""
    text = f"""## Errors and memory

{repeated}Both passes over one sequence of {most["length"]:,} tokens take {megabytes["own"]} at their peak,
PyTorch's flash attention {megabytes["torch_flash"]}, its textbook formula {megabytes["torch_math"]}. The table has the
largest errors against float64, over those of plain PyTorch in the same dtype.

{folded(f"{len(rows)} errors", table(["dtype", "result", "own kernels", "deterministic"], rows, 2))}

{sources("python -m benchmarks.kernels.training_checks", name, part="checks")}
"""
    return Section(text, [])


SECTIONS: Final[tuple[Callable[[], Section | None], ...]] = (batches, trees, block, lengths, checks)
