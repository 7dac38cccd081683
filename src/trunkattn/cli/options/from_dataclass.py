"""Commands made of dataclasses of options, and the report of bad values."""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar, get_args

import typer
from typer.models import ArgumentInfo, OptionInfo

from trunkattn.cli.options.kinds import local_model
from trunkattn.validate import expanded

Options = TypeVar("Options")

MODEL_ARGUMENT: Final = inspect.Parameter(
    "model_argument",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[
        Path | None,
        typer.Argument(
            parser=local_model,
            metavar="MODEL",
            help="A local Hugging Face folder (config.json and *.safetensors) or a .gguf file.",
        ),
    ],
)


def _one_model(argument: Path | None, option: Path | None) -> Path:
    """The model, which is given once."""
    if argument is not None and option is not None:
        raise typer.BadParameter(f"given together with MODEL={str(argument)!r}: expected one", param_hint="--model")
    model = option if argument is None else argument
    if model is None:
        raise typer.BadParameter(
            "no model given: expected MODEL or --model PATH, a local Hugging Face folder or a .gguf file",
            param_hint="--model",
        )
    return model


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
    takes_model = any(parameter.name == "model" and parameter.default is parameter.empty for parameter in parameters)
    if takes_model:
        optional = [
            parameter.replace(default=None) if parameter.name == "model" else parameter for parameter in parameters
        ]
        parameters = [MODEL_ARGUMENT, *optional]

    def decorate(function: Callable[[Options], None]) -> Callable[..., None]:
        def run(**values: Any) -> None:
            if takes_model:
                values["model"] = _one_model(values.pop(MODEL_ARGUMENT.name), values["model"])
            with reported_by_option(options):
                checked = options(**{name: _at_home(value) for name, value in values.items()})
            function(checked)

        run.__name__, run.__doc__ = function.__name__, function.__doc__
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return run

    return decorate


def _at_home(value: Any) -> Any:
    """The value of an option, with `~` in a path or a list of paths replaced by the home folder. Shells do not replace
    it in `--option=~/file`."""
    if isinstance(value, list):
        return [_at_home(one) for one in value]
    return expanded(value) if isinstance(value, Path) else value


@contextmanager
def reported_by_option(options: type[Any]) -> Iterator[None]:
    """Context in which the library's errors `name=value: expected ...` become errors of the option or field of that
    name, with exit code 2. So do a missing package, and a file that cannot be opened."""
    try:
        yield
    except ImportError as error:
        raise typer.BadParameter(str(error)) from error
    except OSError as error:
        if error.filename is None:  # not about a file that the user named
            raise
        message = f"{str(error.filename)!r}: {error.strerror}; expected a file or a folder that can be read"
        raise typer.BadParameter(message) from error
    except (TypeError, ValueError) as error:
        name, value = _split(str(error))
        names = {field.name: _option_name(field) for field in fields(options)}
        option = names.get(name, f"--{name.replace('_', '-')}")
        if option not in names.values():
            raise typer.BadParameter(_by_option(str(error), names)) from error
        raise typer.BadParameter(_by_option(value, names), param_hint=option) from error


def _by_option(message: str, names: Mapping[str, str]) -> str:
    """Replaces names of fields in a message of the library by those of the command line. Names of one word stay,
    because they may be plain words. So does text in double quotes, such as a field of a file."""
    return re.sub(r'(?<![\w"-])[a-z]+(?:_[a-z]+)+\b', lambda found: names.get(found[0], found[0]), message)


def _option_name(field: Field[Any]) -> str:
    """The command line's name for a field: its option, or the placeholder of its argument."""
    for each in get_args(field.type):
        if isinstance(each, ArgumentInfo) and each.metavar:
            return str(each.metavar)
        if isinstance(each, OptionInfo):  # typer keeps its first name as the default
            names = [name for name in (each.default, *(each.param_decls or ())) if isinstance(name, str)]
            return next(iter(names), f"--{field.name.replace('_', '-')}")
    return f"--{field.name.replace('_', '-')}"


def fields_of(target: type[Any], options: Any) -> dict[str, Any]:
    """The options that have the name of a field of the dataclass `target`."""
    given = {field.name for field in fields(options)}
    return {field.name: getattr(options, field.name) for field in fields(target) if field.name in given}


def _split(message: str) -> tuple[str, str]:
    match = re.match(r"(\w+)=(.*)", message, re.DOTALL)
    return (match[1], match[2]) if match else ("", message)
