"""How an option is declared: what its text becomes, and where it stands in the help. No torch here."""

import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import typer

SAMPLING, ENGINE, SERVER, OUTPUT = "Sampling", "Engine", "Server", "Output"
JSON_OPTION: Final = typer.Option("--json", help="Print one JSON object and nothing else.", rich_help_panel=OUTPUT)
UNITS: Final = MappingProxyType(
    {"": 1, "b": 1}
    | {f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", 1)}
    | {f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", 1)}
)


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


def size(value: str | int) -> int:
    """An option's value, or its default, as a number of bytes. The library checks its range."""
    text = str(value)
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(\w*)", text.strip())
    if match is None or match[2].lower() not in UNITS:
        raise typer.BadParameter(f"{text!r}: expected bytes, such as 2GiB, 512MiB or 2147483648")
    return int(Fraction(match[1]) * UNITS[match[2].lower()])


def local_model(text: str) -> Path:
    """The path of a model. Refuses an empty text, such as that of an unset variable: as a path it would mean the
    current folder."""
    if not text:
        raise typer.BadParameter("'': expected a local Hugging Face folder or a .gguf file")
    return Path(text)


def text_option(panel: str | None, text: str, *names: str, metavar: str = "TEXT", **how: Any) -> Any:
    """An option. panel: its group in the help; text: what the help says. names: empty: that of its field. how: more
    arguments of `typer.Option`."""
    return typer.Option(*names, metavar=metavar, help=text, rich_help_panel=panel, **how)


def texts_option(panel: str | None, text: str, metavar: str = "TEXT", **how: Any) -> Any:
    """An option that may be given several times. The rest is as for `text_option`."""
    return text_option(panel, f"{text} Repeat the option for more.", metavar=metavar, **how)


def parsed_option(panel: str | None, text: str, *names: str, metavar: str, parser: Callable[[str], Any]) -> Any:
    """An option whose text a function turns into its value."""
    return text_option(panel, text, *names, metavar=metavar, parser=parser)


def integer_option(panel: str, text: str, *names: str) -> Any:
    """An option that is an integer."""
    return parsed_option(panel, text, *names, metavar="INTEGER", parser=integer)


def number_option(panel: str, text: str) -> Any:
    """An option that is a number."""
    return parsed_option(panel, text, metavar="NUMBER", parser=number)


def size_option(panel: str, text: str, *names: str) -> Any:
    """An option that is a number of bytes."""
    return parsed_option(panel, text, *names, metavar="SIZE", parser=size)


def flag_option(panel: str | None, name: str, text: str, **how: Any) -> Any:
    """An option without a value. name: such as "--strict", or "--chat/--no-chat" where it can be taken back."""
    return typer.Option(name, help=text, rich_help_panel=panel, **how)


PREFIX_CACHING_OPTION: Final = flag_option(
    ENGINE,
    "--enable-prefix-caching/--no-enable-prefix-caching",
    "Keep the KV pages of prompts, and use them again for prompts that begin alike.",
)
