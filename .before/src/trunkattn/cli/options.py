"""Options of the commands: dataclasses that typer reads, and how a bad value is reported."""

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from trunkattn.planner.build import POLICIES

Options = TypeVar("Options")

SAMPLING, ENGINE, OUTPUT = "Sampling", "Engine", "Output"
JSON_OPTION = typer.Option("--json", help="Print one JSON object and nothing else.", rich_help_panel=OUTPUT)
LEAST_DEMO_TOKENS = 8  # fewer leave no step in which every customer decodes


def integer(text: str) -> int:
    """An option's value; the error names it."""
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r}: expected an integer") from None


def number(text: str) -> float:
    """An option's value; the error names it."""
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r}: expected a number") from None


def _integer(panel: str, text: str, *names: str) -> Any:
    return typer.Option(*names, parser=integer, metavar="INTEGER", help=text, rich_help_panel=panel)


def _number(panel: str, text: str) -> Any:
    return typer.Option(parser=number, metavar="NUMBER", help=text, rich_help_panel=panel)


@dataclass(frozen=True)
class DoctorOptions:
    """Command line of `trunkattn doctor`."""

    as_json: Annotated[bool, JSON_OPTION] = False


@dataclass(frozen=True)
class DemoOptions:
    """Command line of `trunkattn demo`; raises ValueError for too few tokens. The engine checks the page size."""

    max_tokens: Annotated[int, _integer(SAMPLING, f"Most tokens of an answer, at least {LEAST_DEMO_TOKENS}.")] = 64
    page_size: Annotated[int, _integer(ENGINE, "Tokens per KV page.")] = 8
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Where the picture of the forest goes.", rich_help_panel=OUTPUT)
    ] = Path("out")
    as_json: Annotated[bool, JSON_OPTION] = False

    def __post_init__(self) -> None:
        if self.max_tokens < LEAST_DEMO_TOKENS:
            raise ValueError(f"max_tokens={self.max_tokens}: expected an integer >= {LEAST_DEMO_TOKENS}")


@dataclass(frozen=True)
class GenerateOptions:
    """Command line of `trunkattn generate`. The sampling options are vLLM's; the library checks their values."""

    model: Annotated[
        Path,
        typer.Option(
            metavar="PATH", help="A local Hugging Face folder (config.json and *.safetensors) or a .gguf file."
        ),
    ]
    prompt: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="A prompt. Repeat it for several: what they share is read once."),
    ] = None
    prompt_file: Annotated[
        list[Path] | None,
        typer.Option(metavar="PATH", help="A UTF-8 text file that is one prompt. Repeat it for several."),
    ] = None
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            help="Put each prompt into the model's chat template, or take it as it is. Default: --chat if the model "
            "has a template.",
            show_default=False,
        ),
    ] = None
    max_tokens: Annotated[int, _integer(SAMPLING, "Most tokens of an answer.")] = 128
    temperature: Annotated[
        float, _number(SAMPLING, "0 takes the most likely token; 1 samples from the model as it is.")
    ] = 0.0
    top_p: Annotated[float, _number(SAMPLING, "Keep the fewest most likely tokens that sum to this probability.")] = 1.0
    top_k: Annotated[int, _integer(SAMPLING, "Keep this many most likely tokens; 0 keeps all.")] = 0
    n: Annotated[int, _integer(SAMPLING, "Answers per prompt; the prompt is computed once.", "--n", "-n")] = 1
    seed: Annotated[int | None, _integer(SAMPLING, "The same seed gives the same answers.")] = None
    stop: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="Text that ends an answer. Repeat it for several.", rich_help_panel=SAMPLING),
    ] = None
    logprobs: Annotated[
        int | None, _integer(SAMPLING, "Report log-probabilities: this many most likely tokens at each step.")
    ] = None
    ignore_eos: Annotated[
        bool,
        typer.Option("--ignore-eos", help="Go on after the end-of-sequence token.", rich_help_panel=SAMPLING),
    ] = False
    policy: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help=f"How shared prefixes are packed: {', '.join(POLICIES)}. per_query shares nothing, auto takes the "
            "cheapest. It changes the speed, not the answers.",
            rich_help_panel=ENGINE,
        ),
    ] = "auto"
    page_size: Annotated[int, _integer(ENGINE, "Tokens per KV page.")] = 16
    max_num_seqs: Annotated[int, _integer(ENGINE, "Answers that are computed at once; the others wait.")] = 256
    max_num_batched_tokens: Annotated[
        int, _integer(ENGINE, "Tokens of a step, at least --max-num-seqs. Fewer make steadier times between tokens.")
    ] = 2048
    scheduler_policy: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Who gets a step's tokens: hybrid, prefill_first. hybrid computes long prompts in chunks beside the "
            "running answers, prefill_first whole while the running answers stall.",
            rich_help_panel=ENGINE,
        ),
    ] = "hybrid"
    device: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Where the model runs: cpu (in float32), cuda (in its own precision), or one GPU such as cuda:1.",
            rich_help_panel=ENGINE,
        ),
    ] = "cpu"
    gpu_memory_utilization: Annotated[
        float | None,
        _number(ENGINE, "Share of the GPU's free memory that the KV cache takes; 0.9 if not given."),
    ] = None
    enforce_eager: Annotated[
        bool,
        typer.Option("--enforce-eager", help="Use no CUDA graphs on a GPU.", rich_help_panel=ENGINE),
    ] = False
    as_json: Annotated[bool, JSON_OPTION] = False


def command(options: type[Options]) -> Callable[[Callable[[Options], None]], Callable[..., None]]:
    """Makes a function of one dataclass a command whose options are the dataclass's fields (typer reads signatures)."""
    parameters = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=field.type,
        )
        for field in fields(options)  # type: ignore[arg-type]
    ]

    def decorate(function: Callable[[Options], None]) -> Callable[..., None]:
        def run(**values: Any) -> None:
            with reported_by_option(options):
                checked = options(**values)
            function(checked)

        run.__name__, run.__doc__ = function.__name__, function.__doc__
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return run

    return decorate


@contextmanager
def reported_by_option(options: type[Any]) -> Iterator[None]:
    """Turns the library's `name=value: expected ...` into an error of the option of that name, exit code 2."""
    try:
        yield
    except (TypeError, ValueError) as error:
        name, value = _split(str(error))
        if name not in {field.name for field in fields(options)}:
            raise typer.BadParameter(str(error)) from error
        raise typer.BadParameter(value, param_hint=f"--{name.replace('_', '-')}") from error


def _split(message: str) -> tuple[str, str]:
    match = re.match(r"(\w+)=(.*)", message, re.DOTALL)
    return (match[1], match[2]) if match else ("", message)
