"""`trunkattn analyze`: reads a log and says what sharing is worth."""

import json
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from trunkattn.analysis import settings
from trunkattn.analysis.pricing.memory import cache_pages, check_cards
from trunkattn.analysis.pricing.model_shape import model_shape
from trunkattn.cli.options.analysis import AnalyzeOptions
from trunkattn.cli.options.from_dataclass import reported_by_option
from trunkattn.cli.streams import STANDARD_STREAM, as_file, check_writable, write
from trunkattn.gpu.cards import card_named
from trunkattn.interrupts import ends_at_once


def run_analyze(options: AnalyzeOptions) -> None:
    """Checks the options, reads the log, replays it, and writes what was found. Large packages are loaded after the
    checks, and files are written after everything else."""
    with reported_by_option(AnalyzeOptions):
        check_options(options)
    from trunkattn.analysis.analyze import analyze, setup_of
    from trunkattn.analysis.reading.log import read_log
    from trunkattn.analysis.reports.html import to_html
    from trunkattn.analysis.reports.report import print_analysis, to_dict

    errors = Console(file=sys.stderr)
    with reported_by_option(AnalyzeOptions):
        with ends_at_once():
            setup_of(options.settings())  # before the log is read, which may last minutes
        with shown_progress(errors) as progress, as_file(options.log) as place, _reported_as_log(), ends_at_once():
            log = read_log(
                place,
                format=options.log_format,
                tokenizer=options.tokenizer,
                strict=options.strict,
                progress=progress,
            )
        with shown_progress(errors, len(log.requests)) as progress:
            analysis = analyze(log, options.settings(), progress)
    if options.json_file is not None:
        written = to_dict(analysis, show_text=options.show_text)
        write(options.json_file, json.dumps(written, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    if options.html_file is not None:
        write(options.html_file, to_html(analysis, show_text=options.show_text))
    if STANDARD_STREAM in (options.json_file, options.html_file):
        return
    print_analysis(analysis, Console(), show_text=options.show_text)
    for path in (options.json_file, options.html_file):
        if path is not None:
            errors.print(f"written: {path}", style="dim", markup=False, highlight=False)


@contextmanager
def _reported_as_log() -> Iterator[None]:
    """Reports an error in a log unchanged, because its fields may have the same names as options."""
    try:
        yield
    except ValueError as error:
        if re.match(r"(log|format|tokenizer)=", str(error)):
            raise
        raise typer.BadParameter(str(error), param_hint="LOG") from error


def check_options(options: AnalyzeOptions) -> None:
    """Raises ValueError for bad options: first those that can be checked without any package, then those that need
    NumPy."""
    wanted = options.settings()
    shape, card = model_shape(options.model), card_named(options.card)
    check_cards(shape, options.tensor_parallel)
    cache_pages(wanted, shape, card)
    log = options.log
    if log != STANDARD_STREAM and not log.exists():
        raise ValueError(f"log={str(log)!r}: expected a file or a folder that exists, or - for standard input")
    check_outputs(options, {log: "LOG"} if log.is_file() else {})
    from trunkattn.analysis.formats.table import format_named
    from trunkattn.analysis.reading.files import files_of
    from trunkattn.analysis.reading.tokens import check_tokenizer

    if log.is_dir():
        check_outputs(options, dict.fromkeys(files_of(log), "LOG"))
    if options.log_format != "auto":
        format_named(options.log_format)
    if options.tokenizer is not None:
        check_tokenizer(options.tokenizer)


def check_outputs(options: AnalyzeOptions, inputs: Mapping[Path, str]) -> None:
    """Raises ValueError unless all outputs can be written and none overwrites an input. inputs: file -> its option."""
    check_writable("json_file", options.json_file, inputs)
    others = inputs if options.json_file is None else {**inputs, options.json_file: "--json"}
    check_writable("html_file", options.html_file, others)


@contextmanager
def shown_progress(console: Console, num_requests: int | None = None) -> Iterator[settings.Progress]:
    """A bar of what is being done.

    Args:
        console: where it is shown.
        num_requests: requests of the log, in which the bar counts; None: it counts in percent.
    """
    counted = (
        "{task.percentage:3.0f} %" if num_requests is None else "{task.completed:,.0f} of {task.total:,.0f} requests"
    )
    columns = (
        TextColumn("{task.description}", markup=False),  # it names the log
        BarColumn(),
        TextColumn(counted),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    total = 1.0 if num_requests is None else float(num_requests)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("reading" if num_requests is None else "replaying", total=total)

        def progress(what: str, share: float) -> None:
            bar.update(task, description=what, completed=share * total)

        yield progress
