"""`trunkattn analyze`: a log in, and out what sharing is worth."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from trunkattn.analysis import settings
from trunkattn.analysis.model_shape import model_shape
from trunkattn.cli.analysis_options import AnalyzeOptions
from trunkattn.cli.command import reported_by_option

STANDARD_OUTPUT = Path("-")


def run_analyze(options: AnalyzeOptions) -> None:
    """Checks the options, reads the log, replays it, and writes what was found. Large packages are loaded after the
    checks, and files are written after everything else."""
    with reported_by_option(AnalyzeOptions):
        if not options.log.expanduser().exists():
            raise ValueError(f"log={str(options.log)!r}: expected a file or a folder that exists")
        model_shape(options.model)
        for name, path in (("json_file", options.json_file), ("html_file", options.html_file)):
            check_writable(name, path)
    from trunkattn.analysis.analyze import analyze, setup_of
    from trunkattn.analysis.html import to_html
    from trunkattn.analysis.reading import read_log
    from trunkattn.analysis.report import print_analysis, to_dict

    errors = Console(file=sys.stderr)
    with reported_by_option(AnalyzeOptions):
        setup_of(options.settings())  # before the log is read, which may last minutes
        with shown_progress(errors) as progress:
            log = read_log(
                options.log,
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
    if STANDARD_OUTPUT in (options.json_file, options.html_file):
        return
    print_analysis(analysis, Console(), show_text=options.show_text)
    for path in (options.json_file, options.html_file):
        if path is not None:
            errors.print(f"written: {path}", style="dim", markup=False, highlight=False)


def check_writable(name: str, path: Path | None) -> None:
    """Raises ValueError unless a file can be written there, before any work is done. `name` is the option's field."""
    if path is None or path == STANDARD_OUTPUT:
        return
    if path.is_dir():
        raise ValueError(f"{name}={str(path)!r}: expected a file, and this is a folder")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{name}={str(path)!r}: expected a file in a folder that exists")


def write(path: Path, text: str) -> None:
    """Writes a text, to standard output if the path is "-"."""
    if path == STANDARD_OUTPUT:
        typer.echo(text, nl=False)
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        typer.echo(f"trunkattn: {path} was not written: {error.strerror}", err=True)
        raise typer.Exit(1) from error


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
        TextColumn("{task.description}"),
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
