"""The typer application: its commands and their help texts."""

from typing import Annotated

import typer

import trunkattn
from trunkattn.cli.command import command
from trunkattn.cli.options import DemoOptions, DoctorOptions, GenerateOptions, ServeOptions
from trunkattn.cli.packages import ENGINE_PACKAGES, SERVER_PACKAGES, missing_packages
from trunkattn.names import install_command

app = typer.Typer(
    name="trunkattn",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


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


@app.command()
@command(DemoOptions)
def demo(options: DemoOptions) -> None:
    """Serve 32 customers of a shop on this machine, and show what sharing saves.

    A small language model (SmolLM2-135M) answers from the shop's guide, with which every prompt begins. Some answers
    are shown as they grow. Then the same batch is measured with sharing (policy `auto`) and without it (`per_query`),
    and a picture shows the prefix forest and the bytes read. The demo runs on the CPU,
    on two cores for one to four minutes. `trunkattn doctor` says how to install the model.
    """
    need_engine()
    from trunkattn.cli.demo import run_demo_command

    run_demo_command(options)


@app.command()
@command(GenerateOptions)
def generate(options: GenerateOptions) -> None:
    """Answer prompts with a local model.

    Prompts come from `--prompt`, from `--prompt-file`, or from standard input (one prompt). Several prompts run as
    one batch, and their shared prefixes are computed and read once. Nothing is downloaded.

    Example: `trunkattn generate ./SmolLM2 --prompt "Why is the sky blue?"`
    """
    need_engine()
    from trunkattn.cli.generate import run_generate

    run_generate(options)


@app.command()
@command(ServeOptions)
def serve(options: ServeOptions) -> None:
    """Serve a local model over HTTP, with OpenAI's API.

    `/v1/chat/completions`, `/v1/completions`, `/v1/models`, `/tokenize`, `/health`, `/metrics` for Prometheus, and a
    live page at `/`. It listens on this machine alone unless `--host` says otherwise, and ends at SIGTERM or Ctrl+C
    when the running answers are finished.

    Example: `trunkattn serve ./SmolLM2`
    """
    _need(SERVER_PACKAGES, "serve")
    from trunkattn.cli.serve import run_serve

    run_serve(options)


@app.command()
@command(DoctorOptions)
def doctor(options: DoctorOptions) -> None:
    """Show what this machine has, what runs here, and how to install what is missing.

    Runs a small attention on the CPU and compares it with the float64 reference. The first run compiles the kernels,
    which takes up to a minute. The exit code is 0 if the library and the engine work on this CPU, otherwise 1.
    """
    from trunkattn.cli.doctor import run_doctor

    run_doctor(options)
