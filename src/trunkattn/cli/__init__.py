"""The command `trunkattn`: demo, generate, serve, doctor. Names the libraries that it lacks in one line."""

import sys
from importlib.util import find_spec

__all__ = ["main"]

LIBRARIES = ("typer", "rich")


def main() -> None:
    """Entry point of the console script and of `python -m trunkattn`."""
    missing = [name for name in LIBRARIES if find_spec(name) is None]
    if missing:
        sys.exit(f'trunkattn: the command needs {" and ".join(missing)}: pip install "trunkattn[engine]"')
    from trunkattn.cli.app import app

    app()
