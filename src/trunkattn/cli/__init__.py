"""The command `trunkattn`: demo, generate, serve, doctor. Names the libraries that it lacks in one line."""

import os
import sys
from importlib.util import find_spec

from trunkattn.names import install_command

__all__ = ["main"]

LIBRARIES = ("typer", "rich")


def main() -> None:
    """Entry point of the console script and of `python -m trunkattn`."""
    # GNU OpenMP's threads spin while they wait. Beside other work that takes the processor from the thread that they
    # wait for. The variables are read when torch is loaded.
    if "GOMP_SPINCOUNT" not in os.environ:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    missing = [name for name in LIBRARIES if find_spec(name) is None]
    if missing and sys.argv[1:2] == ["doctor"]:
        from trunkattn.cli.doctor import run_plainly

        sys.exit(run_plainly("--json" in sys.argv))
    if missing:
        sys.exit(f"trunkattn: the command needs {' and '.join(missing)}: {install_command('engine')}")
    from trunkattn.cli.app import app

    app()
