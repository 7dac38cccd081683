"""The demo's figures: the result of its runs, and the two tables."""

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trunkattn.cli.demo.measure import (
    BatchRun,
    Measurement,
    Snapshot,
    Step,
    contiguous_usage,
    measurement,
    megabytes,
    snapshot,
)
from trunkattn.cli.demo.workload import DemoWorkload
from trunkattn.dtypes import dtype_name
from trunkattn.engine import LLM, RequestOutput
from trunkattn.kv_cache.manager import SlotUsage
from trunkattn.names import install_command

_BUSY_CORES: Final = 0.2  # a machine counts as idle if other programs keep fewer cores than this busy


class Widest:
    """The decode step that held the most pages, among those in which no request ended. The picture and the table of the
    caches show it."""

    def __init__(self) -> None:
        self._found: tuple[Snapshot, Step] | None = None

    def look(self, llm: LLM, step: Step, outputs: Sequence[RequestOutput | None]) -> None:
        """Keeps the latest step if it is the widest so far."""
        taken = snapshot(llm, outputs)
        if not step.is_decode or len(taken.positions) != step.generated_tokens:
            return
        if self._found is None or taken.usage.pages_held >= self.taken.usage.pages_held:
            self._found = taken, step

    @property
    def taken(self) -> Snapshot:
        """The cache after the step."""
        assert self._found is not None, "no step decoded without a request ending in it"
        return self._found[0]

    @property
    def step(self) -> Step:
        """What the step computed and read."""
        assert self._found is not None, "no step decoded without a request ending in it"
        return self._found[1]


@dataclass(frozen=True)
class CacheFigures:
    """The KV of the same requests at the widest step, held in one of two ways.

    Attributes:
        tokens, held, reserved, internal, external: token slots, see `SlotUsage`.
        utilisation: tokens / held.
        held_bytes: memory of the held slots.
    """

    tokens: int
    held: int
    utilisation: float
    reserved: int
    internal: int
    external: int
    held_bytes: int


@dataclass(frozen=True)
class DemoResult:
    """Everything that the demo shows. `--json` prints these fields.

    other_cores: cores that other programs kept busy while the policies were measured; None where nobody knows.
    """

    settings: dict[str, Any]
    policies: dict[str, Measurement]
    identical_answers: int
    cache: dict[str, CacheFigures]
    answers: list[dict[str, Any]]
    picture: str | None
    other_cores: float | None


def summarise(
    llm: LLM,
    workload: DemoWorkload,
    runs: Mapping[str, BatchRun],
    widest: Widest,
    picture: Path | None,
    other_cores: float | None,
) -> DemoResult:
    """Figures of the measured runs; `llm` is the engine of policy auto."""
    per_query, auto = (_answers(runs[policy]) for policy in ("per_query", "auto"))
    token_bytes, max_model_len = llm.kv_cache.bytes_per_token, llm.engine.limits.max_model_len
    contiguous = contiguous_usage(widest.taken, runs["auto"].outputs, max_model_len)
    lengths = [len(output.prompt_token_ids) for output in runs["auto"].outputs]
    return DemoResult(
        settings={
            "requests": len(lengths),
            "prompt_tokens": [min(lengths), max(lengths)],
            "page_size": llm.config.page_size,
            "max_model_len": max_model_len,
            "dtype": dtype_name(llm.model.dtype),
            "threads": torch.get_num_threads(),
            "machine": platform.machine(),
            "versions": {name: version(name) for name in ("torch", "transformers", "numba")},
        },
        policies={policy: measurement(policy, run, llm) for policy, run in runs.items()},
        identical_answers=sum(one == other for one, other in zip(per_query, auto, strict=True)),
        cache={
            "paged": _cache_figures(widest.taken.usage, token_bytes),
            "contiguous": _cache_figures(contiguous, token_bytes),
        },
        answers=[
            {"customer": customer, "department": department, "answer": output.outputs[0].text}
            for customer, department, output in zip(
                workload.customers, workload.departments, runs["auto"].outputs, strict=True
            )
        ],
        picture=None if picture is None else str(picture),
        other_cores=None if other_cores is None else round(other_cores, 2),
    )


def print_result(result: DemoResult, console: Console) -> None:
    """Prints both tables and the path of the picture."""
    console.print()
    console.print(policy_table(result))
    if words := busy_words(result.other_cores, os.cpu_count() or 1):
        console.print(words, style="yellow", markup=False, highlight=False)
    console.print()
    console.print(cache_table(result))
    console.print()
    if result.picture is None:
        words = f"There is no picture, because it needs matplotlib: {install_command('bench')}"
        console.print(words, markup=False, highlight=False)
    else:
        console.print(Text.assemble("Picture of the forest, with the bytes read and saved: ", (result.picture, "bold")))


def busy_words(other_cores: float | None, num_cores: int) -> str:
    """A warning about the figures if the machine was not idle; empty if it was, or if that is unknown."""
    if other_cores is None or other_cores < _BUSY_CORES:
        return ""
    return (
        f"Other programs kept {other_cores:.1f} of {num_cores} cores busy meanwhile. On an idle machine both columns "
        "are faster, and what they differ by is surer."
    )


def policy_table(result: DemoResult) -> Table:
    """Policy `per_query` against `auto`."""
    per_query, auto = result.policies["per_query"], result.policies["auto"]
    total = len(result.answers)
    table = Table("", "per_query", "auto", "", title="One query at a time, and sharing", title_style="bold")
    for column in table.columns[1:]:
        column.justify = "right"
    rows = (
        ("tokens/s, decode steps", "decode_tokens_per_second", "{:.0f}", 1),
        ("tokens/s, whole run with prompts", "tokens_per_second", "{:.0f}", 1),
        ("time to first token, mean", "time_to_first_token", "{:.2f} s", -1),
        ("time per output token, mean", "time_per_output_token", "{:.3f} s", -1),
        ("KV tokens read per decode step", "kv_tokens_read", "{:,.0f}", -1),
    )
    for name, field, form, direction in rows:
        before, after = getattr(per_query, field), getattr(auto, field)
        table.add_row(name, form.format(before), form.format(after), f"{(after / before) ** direction:.1f}×")
    table.add_row("KV read per decode step", megabytes(per_query.kv_bytes_read), megabytes(auto.kv_bytes_read), "")
    table.add_row("KV memory held, peak", megabytes(per_query.kv_bytes_held), megabytes(auto.kv_bytes_held), "")
    times = f"{auto.kv_bytes_unshared / auto.kv_bytes_held:.1f}×"
    table.add_row(
        "  with a copy per request", megabytes(per_query.kv_bytes_unshared), megabytes(auto.kv_bytes_unshared), times
    )
    equal = f"{result.identical_answers} of {total}"
    table.add_row("answers identical", "", equal, "yes" if result.identical_answers == total else "no")
    table.caption = (
        "Same prompts and settings, greedy. The prefix cache is on, and empty at the start of each run; the kernels "
        "are already compiled. The policies run in turn; each column is the run of median time."
    )
    return table


def cache_table(result: DemoResult) -> Table:
    """The paged cache against a contiguous reservation of the maximum length per request."""
    paged, contiguous = result.cache["paged"], result.cache["contiguous"]
    settings = result.settings
    table = Table(
        "", f"pages of {settings['page_size']} tokens", f"{settings['max_model_len']:,} for each request",
        title="The KV cache at the widest step", title_style="bold",
    )  # fmt: skip
    for column in table.columns[1:]:
        column.justify = "right"
    rows = (
        ("slots held", "held"),
        ("slots that hold a token", "tokens"),
        ("waste: reserved for later tokens", "reserved"),
        ("waste: internal, never filled", "internal"),
        ("waste: external, too small for a request", "external"),
    )
    for name, field in rows:
        table.add_row(name, f"{getattr(paged, field):,}", f"{getattr(contiguous, field):,}")
    table.add_row("memory held", megabytes(paged.held_bytes), megabytes(contiguous.held_bytes))
    table.add_row("utilisation", f"{paged.utilisation:.1%}", f"{contiguous.utilisation:.1%}", style="bold")
    return table


def _cache_figures(usage: SlotUsage, token_bytes: int) -> CacheFigures:
    return CacheFigures(
        tokens=usage.tokens,
        held=usage.held,
        utilisation=usage.utilisation,
        reserved=usage.reserved,
        internal=usage.internal,
        external=usage.external,
        held_bytes=usage.held * token_bytes,
    )


def _answers(run: BatchRun) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in run.outputs]
