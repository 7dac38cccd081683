"""Options of the commands: dataclasses that typer reads, and how a bad value is reported."""

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

Options = TypeVar("Options")

SAMPLING, ENGINE, OUTPUT = "Sampling", "Engine", "Output"
JSON_OPTION = typer.Option("--json", help="Print one JSON object and nothing else.", rich_help_panel=OUTPUT)


@dataclass(frozen=True)
class DoctorOptions:
    """Command line of `trunkattn doctor`."""

    as_json: Annotated[bool, JSON_OPTION] = False


@dataclass(frozen=True)
class DemoOptions:
    """Command line of `trunkattn demo`."""

    max_tokens: Annotated[int, typer.Option(min=8, help="Most tokens of an answer.", rich_help_panel=SAMPLING)] = 64
    page_size: Annotated[int, typer.Option(min=1, help="Tokens per KV page.", rich_help_panel=ENGINE)] = 8
    out: Annotated[Path, typer.Option(help="Folder for the picture of the forest.", rich_help_panel=OUTPUT)] = Path(
        "out"
    )
    as_json: Annotated[bool, JSON_OPTION] = False


def _sampling(text: str, *names: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=SAMPLING)


@dataclass(frozen=True)
class GenerateOptions:
    """Command line of `trunkattn generate`. The sampling options are vLLM's."""

    model: Annotated[
        Path,
        typer.Option(help="A local Hugging Face folder (config.json and *.safetensors) or a .gguf file."),
    ]
    prompt: Annotated[
        list[str] | None, typer.Option(help="A prompt. Repeat it for several: what they share is read once.")
    ] = None
    prompt_file: Annotated[
        list[Path] | None, typer.Option(help="A UTF-8 text file that is one prompt. Repeat it for several.")
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
    max_tokens: Annotated[int, _sampling("Most tokens of an answer.")] = 128
    temperature: Annotated[float, _sampling("0 takes the most likely token; 1 samples from the model as it is.")] = 0.0
    top_p: Annotated[float, _sampling("Keep the fewest most likely tokens that sum to this probability.")] = 1.0
    top_k: Annotated[int, _sampling("Keep this many most likely tokens; 0 keeps all.")] = 0
    n: Annotated[int, _sampling("Answers per prompt; the prompt is computed once.", "--n", "-n")] = 1
    seed: Annotated[int | None, _sampling("The same seed gives the same answers.")] = None
    stop: Annotated[list[str] | None, _sampling("Text that ends an answer. Repeat it for several.")] = None
    logprobs: Annotated[
        int | None, _sampling("Report log-probabilities: this many most likely tokens at each step.")
    ] = None
    ignore_eos: Annotated[bool, _sampling("Go on after the end-of-sequence token.", "--ignore-eos")] = False
    policy: Annotated[
        str,
        typer.Option(
            help="How shared prefixes are packed: auto, optimal, pat, fasttree, cascade, relay or per_query (no "
            "sharing). Answers do not depend on it, speed does.",
            rich_help_panel=ENGINE,
        ),
    ] = "auto"
    page_size: Annotated[int, typer.Option(help="Tokens per KV page.", rich_help_panel=ENGINE)] = 16
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
            function(options(**values))

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
