"""Numbers of a command line, within bounds: argparse names the option that is out of them."""

import argparse
from collections.abc import Callable


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
