"""The typer application: its commands and their help texts."""

from typing import Annotated, Any

import typer
from typer.core import TyperCommand

import trunkattn
from trunkattn.cli.options.analysis import AnalyzeOptions, ExplainOptions
from trunkattn.cli.options.engine import DemoOptions, DoctorOptions, GenerateOptions, ServeOptions
from trunkattn.cli.options.from_dataclass import command
from trunkattn.cli.packages import ANALYSIS_PACKAGES, ENGINE_PACKAGES, SERVER_PACKAGES, missing_packages
from trunkattn.interrupts import importing
from trunkattn.names import install_command

app = typer.Typer(
    name="trunkattn",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # typer's tables cut the names of options in a terminal of 80 columns
)


class GroupedCommand(TyperCommand):
    """A command whose help lists its options by group."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes the arguments, then each group of options in the order of its first one."""
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is not None:
                default = "Arguments" if parameter.param_type_name == "argument" else "Options"
                groups.setdefault(getattr(parameter, "rich_help_panel", None) or default, []).append(record)
        for name, records in groups.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"trunkattn {trunkattn.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Attention for LLM serving that reads every shared KV byte once. Start with `trunkattn doctor`, then
    `trunkattn demo`."""


def need_engine() -> None:
    """Ends the command with one line if a package of the engine is missing."""
    _need(ENGINE_PACKAGES, "engine")


def _need(packages: tuple[str, ...], extra: str) -> None:
    missing = missing_packages(packages)
    if missing:
        part = "server" if extra == "serve" else extra
        typer.echo(f"trunkattn: the {part} needs {', '.join(missing)}: {install_command(extra)}", err=True)
        raise typer.Exit(1)


@app.command(cls=GroupedCommand)
@command(DemoOptions)
def demo(options: DemoOptions) -> None:
    """Serve 32 customers of a shop, and show what sharing saves.

    A small language model (SmolLM2-135M) answers from the shop's guide, with which every prompt begins. Some answers
    are shown as they grow. Then the same batch is measured with sharing (policy `auto`) and without it (`per_query`),
    and a picture shows the prefix forest and the bytes read. The demo runs on the CPU, on two cores for one to four
    minutes. `trunkattn doctor` says how to install the model.
    """
    need_engine()
    with importing():
        from trunkattn.cli.demo.command import run_demo_command

    run_demo_command(options)


@app.command(cls=GroupedCommand)
@command(GenerateOptions)
def generate(options: GenerateOptions) -> None:
    """Answer prompts with a local model.

    Prompts come from `--prompt`, from `--prompt-file`, or from standard input (one prompt). Several prompts run as
    one batch, and their shared prefixes are computed and read once. Nothing is downloaded.

    Example: `trunkattn generate ./SmolLM2 --prompt "Why is the sky blue?"`
    """
    need_engine()
    with importing():
        from trunkattn.cli.generate import run_generate

    run_generate(options)


@app.command(cls=GroupedCommand)
@command(ServeOptions)
def serve(options: ServeOptions) -> None:
    """Serve a local model over HTTP, with OpenAI's API.

    `/v1/chat/completions`, `/v1/completions`, `/v1/models`, `/tokenize`, `/health`, `/metrics` for Prometheus, and a
    live page at `/`. It listens only on this machine unless `--host` says otherwise, and ends at SIGTERM, Ctrl+C or
    SIGHUP (a closed terminal) when the running answers are finished.

    Example: `trunkattn serve ./SmolLM2`
    """
    _need(SERVER_PACKAGES, "serve")
    with importing():
        from trunkattn.cli.serve import run_serve

    run_serve(options)


@app.command(cls=GroupedCommand)
@command(AnalyzeOptions)
def analyze(options: AnalyzeOptions) -> None:
    """Say what sharing prefixes is worth for the requests of a log.

    The log is replayed without a model: scheduled, cached, and priced by the measured times of a card, with what
    requests share read one by one and read once. The report says how much time per token that saves at which load, and
    what keeps prompts from sharing more. It needs no GPU, and nothing leaves this machine.

    Example: `trunkattn analyze requests.jsonl --gpu "NVIDIA H100" --model llama-3-8b --html report.html`
    """
    _need(ANALYSIS_PACKAGES, "engine")
    with importing():
        from trunkattn.cli.analyze import run_analyze

    run_analyze(options)


@app.command(cls=GroupedCommand)
@command(ExplainOptions)
def explain(options: ExplainOptions) -> None:
    """Explain how each packing policy plans one decode batch.

    Shows the batch's prefix forest, and the items, bytes and time of each policy. The batch is a tree, written as the
    nodes of each level and the tokens of each, or a file with a block table. Times are predicted by the planner's own
    cost model of a card, so no GPU is needed.

    Example: `trunkattn explain 1,4,64_1024,512,128 --gpu "NVIDIA H100"`
    """
    _need(ANALYSIS_PACKAGES, "engine")
    with importing():
        from trunkattn.cli.explain import run_explain

    run_explain(options)


@app.command(cls=GroupedCommand)
@command(DoctorOptions)
def doctor(options: DoctorOptions) -> None:
    """Show what this machine has, what runs here, and what is missing.

    Says how to install what is missing. Runs a small attention on the CPU and compares it with the float64 reference.
    The first run compiles the kernels, which takes up to a minute. The exit code is 0 if the library and the engine
    work on this CPU, otherwise 1.
    """
    with importing():
        from trunkattn.cli.doctor.command import run_doctor

    run_doctor(options)
