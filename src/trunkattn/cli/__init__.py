"""The command `trunkattn`: demo, generate, serve, analyze, explain, doctor. If packages are missing, one line says
so."""

import errno
import os
import sys
from importlib.util import find_spec

from trunkattn.interrupts import CommandSignals, importing
from trunkattn.names import install_command

__all__ = ["main"]

LIBRARIES = ("typer", "rich")
# A full disk or quota, a file that reached its size limit, and a failing device.
WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
# How the message of `tempfile` begins after it tried all folders.
NO_TEMPORARY_FOLDER = "No usable temporary directory"


def main() -> None:
    """Entry point of the console script and of `python -m trunkattn`. Ctrl-C, SIGTERM and SIGHUP end it with one
    line, and with status 130, 143 or 129."""
    with CommandSignals().handling() as signals:
        try:
            _checked()
        except (KeyboardInterrupt, SystemExit):  # typer makes the second of the first
            if signals.received is None:
                raise
            signals.exit()


def _checked() -> None:
    """Runs the command, and says in a line what the system refuses it."""
    is_silent = sys.argv[1:2] == ["serve"] and not {"--help", "-h"} & {*sys.argv}  # it prints no result
    if not is_silent and not _takes_output():
        sys.exit(
            "trunkattn: standard output is closed or cannot be written, so the result would be lost: send it to a "
            "file, or to /dev/null if nobody needs it"
        )
    try:
        _run()
    except BrokenPipeError:  # the reader of the output has ended
        _drop_output()
        sys.exit(1)
    except OSError as error:
        if error.filename is None and str(error.strerror).startswith(NO_TEMPORARY_FOLDER):
            sys.exit(f"trunkattn: {error.strerror}: make room in one of them, or set TMPDIR to a folder that has room")
        if error.filename is None and _current_folder_is_gone():
            sys.exit("trunkattn: the current folder no longer exists: change to one that does")
        if error.errno not in WRITE_ERRORS or error.filename is not None:  # not about the output
            raise
        _drop_output()
        reason = "is full" if error.errno == errno.ENOSPC else f"takes no more ({error.strerror})"
        sys.exit(f"trunkattn: the disk or file that it writes to {reason}: make room, or write to another one")


def _drop_output() -> None:
    """Lets what is left of the output go nowhere. Python flushes it at its end, and would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _takes_output() -> bool:
    """Whether standard output is open for writing. It is None if file descriptor 1 is closed."""
    try:
        return sys.stdout is not None and os.write(1, b"") == 0
    except OSError as error:  # a full disk is reported at the first write
        return error.errno != errno.EBADF


def _current_folder_is_gone() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def _run() -> None:
    """Runs the command. Without the libraries that draw tables only `doctor` runs."""
    missing = [name for name in LIBRARIES if find_spec(name) is None]
    if missing and sys.argv[1:2] == ["doctor"]:
        from trunkattn.cli.doctor.command import run_plainly

        sys.exit(run_plainly(sys.argv[2:]))
    if missing:
        sys.exit(f"trunkattn: the command needs {' and '.join(missing)}: {install_command('engine')}")
    with importing():
        from trunkattn.cli.app import app
        from trunkattn.cli.streams import prepare_standard_streams

    prepare_standard_streams()
    app()
