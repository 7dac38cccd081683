"""Writes the support matrix in README.md and docs/support.md by asking the code what runs where.

    python -m benchmarks.page.support_matrix            # write both
    python -m benchmarks.page.support_matrix --check    # only say whether they are up to date

Each row is an `AttentionConfig`, or in training what `flash_attention` is given. `supports` says whether a device takes
it, and the table of kernels whether one made for Hopper computes it there, decodes or both passes of training. So the
pages change when the code does. No GPU is needed: a card is pretended.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.page.common import table
from trunkattn import AttentionConfig, PrefixTree, flash_attention
from trunkattn.cli.doctor.kernels import MODELS, attention_of
from trunkattn.gpu.cards import H100, H200, Card, GpuFacts
from trunkattn.gpu.kernel import KERNELS, Kernel, Work, choose
from trunkattn.training.spec import TrainingConfig

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "docs" / "support.md")
BEGIN, END = "<!-- written by benchmarks/page/support_matrix.py: {} -->", "<!-- end of {} -->"

CAPABILITIES = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))
HOPPER = (9, 0)


def latent_cache(**changes: Any) -> dict[str, Any]:
    """DeepSeek-V3's attention on one of 8 GPUs, but for the changes."""
    latent = {"num_qo_heads": 16, "num_kv_heads": 1, "head_dim": 512 + 64, "latent_dim": 512, "sm_scale": 192**-0.5}
    return {**latent, **changes}


FEATURES: dict[str, list[dict[str, Any]]] = {
    "bfloat16, float16": [{}, {"dtype": torch.float16}],
    "float32": [{"dtype": torch.float32}],
    "fp8 cache, e5m2": [{"kv_dtype": torch.float8_e5m2}],
    "fp8 cache, e4m3": [{"kv_dtype": torch.float8_e4m3fn}],
    "head_dim 64, 128, 256": [{"head_dim": dim} for dim in (64, 128, 256)],
    "head_dim 96": [{"head_dim": 96}],
    "another head_dim to 256": [{"head_dim": dim} for dim in (80, 192)],
    "head_dim over 256": [{"head_dim": 512}],
    "another head_dim for values": [{"head_dim_v": 64}],
    "latent cache (MLA) of 512 + 64 columns": [latent_cache(num_qo_heads=n) for n in (8, 12, 16, 20, 32, 64, 96, 128)],
    "narrower latent cache": [latent_cache(latent_dim=256, head_dim=256 + 32), latent_cache(head_dim=512 + 32)],
    "latent cache in fp8, e5m2": [latent_cache(kv_dtype=torch.float8_e5m2)],
    "latent cache in fp8, e4m3": [latent_cache(kv_dtype=torch.float8_e4m3fn)],
    "1 to 64 query heads per KV head": [{"num_kv_heads": 1, "num_qo_heads": n} for n in (1, 2, 3, 7, 8, 12, 16, 64)],
    "pages of any size": [{"page_size": size} for size in (1, 8, 16, 24, 32, 64, 528)],
    "logit soft cap": [{"logits_soft_cap": 30.0}],
    "attention sinks": [{"sinks": True}],
    "`batch_invariant`": [{"batch_invariant": True}],
    "a packing policy other than `auto`": [
        {"policy": name} for name in ("per_query", "relay", "cascade", "pat", "optimal")
    ],
    '`execution="overlapped"`': [{"execution": "overlapped"}],
}
TRAINING: dict[str, list[dict[str, Any]]] = {
    "training (`flash_attention`), head_dim 64, 96, 128, 192, 256": [
        {"head_dim": dim} for dim in (64, 96, 128, 192, 256)
    ],
    "training, another head_dim to 256": [{"head_dim": dim} for dim in (32, 100)],
    "training on prefix trees": [{"head_dim": dim, "tree": True} for dim in (64, 128)],
    "training with a sliding window or a soft cap": [{"sliding_window": 2}, {"logits_soft_cap": 30.0}],
}
TRAINING_HEAD_DIM = 128  # where a row does not say it


@contextmanager
def card(capability: tuple[int, int]) -> Iterator[None]:
    """Context in which the machine seems to have one GPU of this compute capability."""
    properties = SimpleNamespace(
        name="a card", major=capability[0], minor=capability[1], multi_processor_count=132, L2_cache_size=50 << 20
    )
    answers = {
        "is_available": True, "device_count": 1, "current_device": 0, "get_device_capability": capability,
        "get_device_properties": properties, "get_device_name": properties.name,
    }  # fmt: skip
    patches = [patch.object(torch.cuda, name, lambda *_, answer=answer: answer) for name, answer in answers.items()]
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in patches:
            each.stop()


def on_cpu(config: AttentionConfig) -> bool:
    return not config.supports("cpu")


def on_cuda(config: AttentionConfig, capability: tuple[int, int]) -> bool:
    with card(capability):
        return not config.supports("cuda")


def cuda_cell(configs: list[AttentionConfig]) -> str:
    """Yes, no, the compute capability it begins with, or the only one."""
    takes = [capability for capability in CAPABILITIES if all(on_cuda(config, capability) for config in configs)]
    if len(takes) == len(CAPABILITIES):
        return "yes"
    if not takes:
        return "no"
    first = f"{takes[0][0]}.{takes[0][1]}"
    return f"{first} and later" if takes == list(CAPABILITIES[-len(takes) :]) else f"{first} only"


def is_decoded_fast(config: AttentionConfig, card: Card, table: tuple[Kernel, ...] = KERNELS) -> bool:
    """Whether a kernel made for the card decodes an attention there."""
    return on_cuda(config, HOPPER) and choose(Work.DECODE, config, card, table).is_fast


def is_trained_fast(options: dict[str, Any], card: Card) -> bool:
    """Whether kernels of ours made for the card compute both passes there."""
    given = tuple(name for name in options if name not in ("head_dim", "tree"))
    head_dim = options.get("head_dim", TRAINING_HEAD_DIM)
    config = TrainingConfig(head_dim, torch.bfloat16, head_dim, given)
    return all(choose(work, config, card).is_fast for work in (Work.FORWARD, Work.BACKWARD))


def hopper_cell(configs: Sequence[Any], is_fast_on: Callable[[Any, Card], bool] = is_decoded_fast) -> str:
    """Yes, no, or the only card."""
    takes = []
    for name, known in (("H100", H100), ("H200", H200)):
        card_of_model = Card(GpuFacts(known.name, 132, 90, 50 << 20), known)
        fast = [is_fast_on(config, card_of_model) for config in configs]
        if any(fast) != all(fast):
            raise ValueError(
                f"the fast kernels take some of {configs} and not others: expected all or none; split the row"
            )
        takes += [name] * all(fast)
    return {0: "no", 1: f"{' '.join(takes)} only", 2: "yes"}[len(takes)]


def rows() -> dict[str, tuple[str, str, str]]:
    """Cells of every feature: CPU, any CUDA card, Hopper's fast kernels."""
    cells = {}
    for name, changes in FEATURES.items():
        configs = [attention_of(change) for change in changes]
        cells[name] = ("yes" if all(map(on_cpu, configs)) else "no", cuda_cell(configs), hopper_cell(configs))
    for name, options in TRAINING.items():
        cpu, cuda = ("yes" if all(trains(device, each) for each in options) else "no" for device in ("cpu", "cuda"))
        cells[name] = (cpu, cuda, hopper_cell(options, is_trained_fast))
    return cells


def features() -> str:
    return centred([(name, *cells) for name, cells in rows().items()])


def summary() -> str:
    """The table of the README: features of equal cells in one row, and none that differs between two Hopper cards."""
    alike: dict[tuple[str, str, str], list[str]] = {}
    for name, cells in rows().items():
        if cells[2] in ("yes", "no"):
            alike.setdefault(cells, []).append(name)
    return centred([("; ".join(names), *cells) for cells, names in alike.items()])


ON_HOPPER = {"yes": "fast", "no": "portable", "H200 only": "fast on an H200, portable on an H100"}


def models() -> str:
    found = []
    for name, change in MODELS.items():
        config = attention_of(change)
        group = config.group_size
        extra = [", soft cap"] * (config.logits_soft_cap is not None) + [", sinks"] * config.sinks
        width, heads = f"head_dim {config.head_dim}", f"query head{'s' * (group > 1)} per KV head"
        if config.latent_dim is not None:
            width, heads = f"latent cache, {config.latent_dim} + {config.head_dim - config.latent_dim}", "query heads"
        shape = f"{width}, {group} {heads}{''.join(extra)}"
        found.append([name, shape, ON_HOPPER[hopper_cell([config])]])
    return table(["model", "attention", "kernel on Hopper"], found, 3)


def centred(cells: Sequence[Sequence[str]]) -> str:
    """A table whose cells but the first of a row are short words."""
    head = ["feature", "CPU", "any CUDA card", "Hopper's fast kernels"]
    return table(head, cells, len(head)).replace("---|---|---|---", "---|:-:|:-:|:-:", 1)


_WITHOUT_CUDA = ("not linked with support for cuda", "with arguments from the 'CUDA' backend")


def trains(device: str, options: dict[str, Any]) -> bool:
    """Whether `flash_attention` takes tensors of this device, forward; on a GPU of tensors without data."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    lead: tuple[int, ...] = (1, 4)
    options = dict(options)
    head_dim = options.pop("head_dim", TRAINING_HEAD_DIM)
    if "tree" in options:
        lead, options = (4,), options | {"tree": PrefixTree.from_segments([-1, 0, 0], [2, 1, 1])}
    with card(HOPPER), FakeTensorMode(allow_non_fake_inputs=True):
        q, k, v = (torch.empty(*lead, heads, head_dim, device=device, dtype=torch.bfloat16) for heads in (4, 2, 2))
        try:
            flash_attention(q, k, v, True, **options)
        except (TypeError, ValueError):
            return False
        except (
            RuntimeError
        ) as error:  # the arguments were accepted, and a torch without CUDA ends in the kernel's place
            return any(words in str(error) for words in _WITHOUT_CUDA)
    return True


PARTS = {"summary": summary, "features": features, "models": models}


def fill(text: str) -> str:
    """`text` with today's tables between its markers; a page may have some of the tables."""
    found = 0
    for name, part in PARTS.items():
        begin, end = BEGIN.format(name), END.format(name)
        before, has_begin, rest = text.partition(begin)
        _, has_end, after = rest.partition(end)
        if has_begin and has_end:
            found += 1
            text = f"{before}{begin}\n\n{part()}\n\n{end}{after}"
    if not found:
        raise ValueError(f"the page has no markers: expected {BEGIN.format('features')} and {END.format('features')}")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is stale")
    options = parser.parse_args()
    stale = {path: fill(path.read_text()) for path in PAGES if fill(path.read_text()) != path.read_text()}
    for path, text in stale.items():
        print(f"{path.relative_to(ROOT)} {'is stale' if options.check else 'written'}")
        if not options.check:
            path.write_text(text)
    sys.exit(options.check and bool(stale))


if __name__ == "__main__":
    main()
