"""Options of the commands: dataclasses from which typer makes a command line, and the report of bad values."""

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from trunkattn.dtypes import POLICIES
from trunkattn.validate import check_int

Options = TypeVar("Options")

SAMPLING, ENGINE, OUTPUT = "Sampling", "Engine", "Output"
JSON_OPTION = typer.Option("--json", help="Print one JSON object and nothing else.", rich_help_panel=OUTPUT)
LEAST_DEMO_TOKENS = 8  # with fewer no step has every customer decoding


def integer(text: str) -> int:
    """An option's value as an integer. The library checks its range."""
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r}: expected an integer") from None


def number(text: str) -> float:
    """An option's value as a number. The library checks its range."""
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
    """Command line of `trunkattn demo`. Raises ValueError for too few tokens; the engine checks the page size."""

    max_tokens: Annotated[int, _integer(SAMPLING, f"Most tokens of an answer, at least {LEAST_DEMO_TOKENS}.")] = 64
    page_size: Annotated[int, _integer(ENGINE, "Tokens per KV page.")] = 8
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="The folder for the forest's picture.", rich_help_panel=OUTPUT)
    ] = Path("out")
    as_json: Annotated[bool, JSON_OPTION] = False

    def __post_init__(self) -> None:
        check_int("max_tokens", self.max_tokens, LEAST_DEMO_TOKENS)


@dataclass(frozen=True)
class GenerateOptions:
    """Command line of `trunkattn generate`.

    An option that has the name of a field of `SamplingParams` or `EngineConfig` sets that field, which checks its
    value. The sampling options have vLLM's names.
    """

    model: Annotated[
        Path,
        typer.Option(
            metavar="PATH", help="A local Hugging Face folder (config.json and *.safetensors) or a .gguf file."
        ),
    ]
    prompt: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="A prompt. Repeat the option for more: a shared prefix is read once."),
    ] = None
    prompt_file: Annotated[
        list[Path] | None,
        typer.Option(metavar="PATH", help="A UTF-8 text file with one prompt. Repeat the option for more."),
    ] = None
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            help="Put each prompt into the model's chat template, or leave it as it is. Default: --chat if the model "
            "has a template.",
            show_default=False,
        ),
    ] = None
    max_tokens: Annotated[int, _integer(SAMPLING, "Most tokens of an answer.")] = 128
    temperature: Annotated[
        float, _number(SAMPLING, "0: always the most likely token. 1: sample from the model's own distribution.")
    ] = 0.0
    top_p: Annotated[
        float, _number(SAMPLING, "Keep the fewest most likely tokens whose probabilities sum to this.")
    ] = 1.0
    top_k: Annotated[int, _integer(SAMPLING, "Keep this many most likely tokens; 0 keeps all.")] = 0
    n: Annotated[int, _integer(SAMPLING, "Answers per prompt; the prompt is computed once.", "--n", "-n")] = 1
    seed: Annotated[int | None, _integer(SAMPLING, "The same seed gives the same answers.")] = None
    stop: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT", help="A text that ends an answer. Repeat the option for more.", rich_help_panel=SAMPLING
        ),
    ] = None
    logprobs: Annotated[
        int | None, _integer(SAMPLING, "Report the log-probabilities of this many most likely tokens at each step.")
    ] = None
    ignore_eos: Annotated[
        bool,
        typer.Option("--ignore-eos", help="Continue after the end-of-sequence token.", rich_help_panel=SAMPLING),
    ] = False
    policy: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help=f"How shared prefixes are packed: {', '.join(POLICIES)}. per_query shares nothing, auto chooses the "
            "cheapest packing. The policy changes the speed, not the answers.",
            rich_help_panel=ENGINE,
        ),
    ] = "auto"
    page_size: Annotated[int, _integer(ENGINE, "Tokens per KV page.")] = 16
    max_num_seqs: Annotated[int, _integer(ENGINE, "Most answers that run at once; the others wait.")] = 256
    max_num_batched_tokens: Annotated[
        int, _integer(ENGINE, "Most tokens of a step, at least --max-num-seqs. Fewer: steadier times between tokens.")
    ] = 2048
    scheduler_policy: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="How the tokens of a step are shared out: chunked_prefill, prefill_first. chunked_prefill (older "
            "name: hybrid) computes long prompts in chunks together with the running answers; prefill_first computes "
            "whole prompts while the running answers stall.",
            rich_help_panel=ENGINE,
        ),
    ] = "chunked_prefill"
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
        _number(ENGINE, "The KV cache's share of the GPU's free memory. Default: 0.9."),
    ] = None
    enforce_eager: Annotated[
        bool,
        typer.Option("--enforce-eager", help="Capture no CUDA graphs on a GPU.", rich_help_panel=ENGINE),
    ] = False
    as_json: Annotated[bool, JSON_OPTION] = False


def command(options: type[Options]) -> Callable[[Callable[[Options], None]], Callable[..., None]]:
    """Decorator: turns a function of one dataclass into a command with an option for each of the dataclass's fields."""
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


def fields_of(target: type[Any], options: Any) -> dict[str, Any]:
    """The options that have the name of a field of the dataclass `target`."""
    given = {field.name for field in fields(options)}
    return {field.name: getattr(options, field.name) for field in fields(target) if field.name in given}


def _split(message: str) -> tuple[str, str]:
    match = re.match(r"(\w+)=(.*)", message, re.DOTALL)
    return (match[1], match[2]) if match else ("", message)
