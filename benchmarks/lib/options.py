"""Values of a command line that are checked: argparse names the option of one that is not accepted."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Parsed = TypeVar("Parsed")


def integer(low: int, high: int) -> Callable[[str], int]:
    """Parses an option's value; the error names the option."""

    def parse(text: str) -> int:
        if not (text.isdecimal() and low <= int(text) <= high):
            raise argparse.ArgumentTypeError(f"expected an integer from {low} to {high}, got {text!r}")
        return int(text)

    return parse


def positive(text: str) -> float:
    """Parses a finite number above 0."""
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a finite number above 0, got {text!r}")
    return number


def existing(text: str) -> Path:
    """Parses the path of a file or a folder, which must be there before anything is measured."""
    path = Path(text)
    if not path.exists():
        raise argparse.ArgumentTypeError(f"{text}: expected a file or a folder that is there")
    return path


def parsed_by(parse: Callable[[str], Parsed]) -> Callable[[str], Parsed]:
    """Parses by a function that raises ValueError for what it does not accept. The error says why, which argparse by
    itself leaves out."""

    def parse_or_say_why(text: str) -> Parsed:
        try:
            return parse(text)
        except ValueError as reason:
            raise argparse.ArgumentTypeError(str(reason)) from reason

    return parse_or_say_why


def accepted_by(parse: Callable[[str], object]) -> Callable[[str], str]:
    """Checks a text as `parsed_by` does, and returns the text."""
    checked = parsed_by(parse)

    def check(text: str) -> str:
        checked(text)
        return text

    return check


def need_gpu(instead: str = "") -> None:
    """Ends the script with a sentence where torch finds no GPU. instead: what it takes there. The number of GPUs is
    asked for, which starts no CUDA in a process that engines fork."""
    import torch

    if torch.cuda.device_count() == 0:
        sys.exit(f"{Path(sys.argv[0]).name}: torch finds no CUDA device: expected an NVIDIA GPU{instead}")


def usable_device(text: str) -> str:
    """Parses the name of a device, of which cuda needs a GPU."""
    import torch

    if text == "cuda" and torch.cuda.device_count() == 0:
        raise argparse.ArgumentTypeError("torch finds no CUDA device: expected cpu, or an NVIDIA GPU")
    return text


def no_options(description: str | None) -> None:
    """Answers `--help`, and refuses any other argument, for a script that measures and writes without a question."""
    argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
