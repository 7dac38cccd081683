"""Training."""

from typing import Any

from benchmarks.page.common import NOTICEABLE, Loss, Section, card_of, load, sources, span, table

PEERS = "flash-training-cudnn-h100"
COMMAND = "python -m benchmarks.kernels.flash_training"
TRAINING_WAYS = ("trunkattn", "torch_flash", "torch_cudnn", "flex_attention")


def forward_and_backward(times: dict[str, Any]) -> float:
    return times["forward"]["ms"] + times["backward"]["ms"]


def over_cudnn() -> list[float]:
    """Our training speed over cuDNN's: forward, backward and both, of each batch."""
    speeds = []
    for row in load(PEERS)["rows"]:
        ours, theirs = row["trunkattn"], row["torch_cudnn"]
        speeds += [theirs[part]["ms"] / ours[part]["ms"] for part in ("forward", "backward")]
        speeds.append(forward_and_backward(theirs) / forward_and_backward(ours))
    return speeds


def over_flex_attention() -> list[float]:
    """Our time on each prefix tree, the prefix repeated, over FlexAttention's with a tree mask."""
    trees = load(PEERS)["trees"]
    return [sum(row["ours_repeated"].values()) / sum(row["flex"].values()) for row in trees]


def cudnn() -> Section:
    """Against PyTorch's cuDNN back end, FlexAttention and FlashAttention-3."""
    rows, speeds = [], over_cudnn()
    for index, row in enumerate(load(PEERS)["rows"]):
        times = [forward_and_backward(row[way]) for way in TRAINING_WAYS]
        third = row["flash_attention_3"]["forward"]["ms"] / row["trunkattn"]["forward"]["ms"]
        figures = [*times, *speeds[3 * index : 3 * index + 3], third]
        rows.append([row["batch"], *(f"{figure:.2f}" for figure in figures)])
    where, range_of = "training in kernels of our own, H100: forward, backward or both", f"from {1 / max(speeds):.2f}×"
    head = ["batch × length, heads", "TrunkAttention", "PyTorch flash", "PyTorch cuDNN", "FlexAttention"]
    head += [*(f"over cuDNN, {part}" for part in ("forward", "backward", "both")), "over FA3, forward"]
    text = f"""## Against cuDNN and FlexAttention

**The kernels of our own are slower than cuDNN.** On an H100 they reach {span(speeds)} of the speed of the same
PyTorch's cuDNN back end. So where it computes the same, on Hopper and Blackwell, `flash_attention` calls it; nobody has
measured that call yet. The figures are of our own kernels: forward and backward in milliseconds, then our speed over
cuDNN's and over FlashAttention-3's.

{table(head, rows)}

{sources(COMMAND, PEERS)}
"""
    return Section(text, [Loss(where, "PyTorch's cuDNN back end", 1 / min(speeds), range_of)])


def trees() -> Section:
    """Sequences that share a prefix."""
    rows, ratios = [], over_flex_attention()
    for row, ratio in zip(load(PEERS)["trees"], ratios, strict=True):
        times = (sum(row[way].values()) for way in ("flex", "ours_repeated"))
        rows.append([row["tree"].replace("+", " + "), *(f"{ms:.1f}" for ms in times), f"{ratio:.2f}×"])
    where = "training on repeated sequences instead of a tree, H100: the prefix is computed for each branch"
    head = ["prefix + branches, tokens", "FlexAttention, tree mask", "TrunkAttention, prefix repeated", "ours over its"]
    text = f"""## Prefix trees

Sequences that share a prefix, forward and backward, ms. FlexAttention computes the prefix once. Repeated sequences, for
which `flash_attention` computes it for each branch, take up to {max(ratios):.2f} times as long. `tree=` computes it
once, too; nobody has measured that yet.

{table(head, rows)}

{sources(COMMAND, PEERS)}
"""
    return Section(text, [Loss(where, "FlexAttention with a tree mask", max(ratios), f"from {min(ratios):.2f}×")])


def torch_flash() -> Section:
    """Against PyTorch's flash back end."""
    names = ("flash-training-h100", "flash-training-h200")
    rows, losses = over_torch_flash(names)
    text = f"""## Against PyTorch's flash back end

About even: speed over that back end's, geometric mean over lengths of 512 to 16,384 tokens, bf16, 32 heads of 128.

{table(["card", "gradients", "mask", "forward", "backward", "both"], rows, 3)}

{sources(COMMAND, *names)}
"""
    return Section(text, losses)


def over_torch_flash(names: tuple[str, ...]) -> tuple[list[list[object]], list[Loss]]:
    """Our speed over that of PyTorch's flash back end."""
    rows: list[list[object]] = []
    losses = []
    for name in names:
        ratios = load(name)["speed_over_torch_flash"]
        for way in ("one_pass", "deterministic"):
            for masks in ("causal", "full"):
                parts = [ratios[f"{way} {part} {masks}"] for part in ("forward", "backward", "both")]
                rows.append([card_of(name), way.replace("_", " "), masks, *(f"{part:.2f}" for part in parts)])
                if 1 / min(parts) > NOTICEABLE:
                    where = f"training, {card_of(name)}, {way.replace('_', ' ')}, {masks}, worst part"
                    losses.append(Loss(where, "PyTorch's flash back end", 1 / min(parts)))
    return rows, losses
