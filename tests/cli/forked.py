"""Commands in forks of one process: Python, and what every command imports, is loaded once for all of them."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

PROGRAM = """
import json, os, sys, tempfile
from trunkattn.cli import app, main

ended = []
for folder, arguments in json.load(sys.stdin):
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if not child:
            code = 70
            try:
                os.chdir(folder)
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                sys.argv = ["trunkattn", *arguments]
                main()
            except SystemExit as end:
                code = end.code
            finally:
                large = ("torch", "numpy", "numba", "transformers", "fastapi")
                print("", *(name for name in large if name in sys.modules), sep="\\0", end="", flush=True)
                sys.stderr.flush()
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
        ended.append([code, *texts])
print(json.dumps(ended))
"""


class Ended(NamedTuple):
    """A command that has ended: its status, what it wrote, and the large packages that were imported."""

    code: int
    out: str
    err: str
    imported: list[str]


def run_all(commands: Sequence[tuple[Path, Sequence[str]]]) -> list[Ended]:
    """Runs commands, each in its folder."""
    given = json.dumps([(str(folder), list(arguments)) for folder, arguments in commands])
    done = subprocess.run([sys.executable, "-c", PROGRAM], input=given, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    ended = []
    for code, out, err in json.loads(done.stdout):
        text, *imported = out.split("\0")
        ended.append(Ended(code, text, err, imported))
    return ended
