"""The command `trunkattn`: demo, generate, serve, analyze, explain, doctor. One line names packages that it lacks."""

import errno
import os
import sys
from importlib.util import find_spec

from trunkattn.names import install_command

__all__ = ["main"]

LIBRARIES = ("typer", "rich")


def main() -> None:
    """Entry point of the console script and of `python -m trunkattn`."""
    # Waiting threads of GNU OpenMP spin. If other programs run, the spinning threads take the processor from the thread
    # that they wait for. The variables are read when torch is loaded.
    if "GOMP_SPINCOUNT" not in os.environ:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    missing = [name for name in LIBRARIES if find_spec(name) is None]
    if missing and sys.argv[1:2] == ["doctor"]:
        from trunkattn.cli.doctor import run_plainly

        sys.exit(run_plainly("--json" in sys.argv))
    if missing:
        sys.exit(f"trunkattn: the command needs {' and '.join(missing)}: {install_command('engine')}")
    from trunkattn.cli.app import app
    from trunkattn.cli.streams import prepare_standard_streams

    prepare_standard_streams()
    try:
        app()
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        sys.exit("trunkattn: the disk that it writes to is full: make room, or write to another one")
