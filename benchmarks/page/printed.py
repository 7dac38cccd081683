"""Writes what commands print into the documentation, after `<!-- printed by: trunkattn ... -->`.

    python -m benchmarks.page.printed

tests/docs/test_printed.py fails while a block differs from what its command prints.
"""

import re
import shlex
from typing import Final

from typer.testing import CliRunner

from benchmarks.lib.options import no_options
from benchmarks.page.common import ROOT
from trunkattn.cli.app import app

PAGES: Final = tuple(sorted((ROOT / "docs").rglob("*.md")))
BLOCK: Final = re.compile(r"(?<=<!-- printed by: trunkattn )(.*)( -->\n```text\n)(.*?)(?=```\n)", re.DOTALL)
COLUMNS: Final = "80"


def printed(command: str) -> str:
    """The standard output of a command, without spaces at the end of lines.

    Raises:
        RuntimeError: it failed.
    """
    done = CliRunner().invoke(app, shlex.split(command), env={"COLUMNS": COLUMNS})
    if done.exit_code:
        raise RuntimeError(f"trunkattn {command} ended with {done.exit_code}: {done.output}")
    return "".join(f"{line.rstrip()}\n" for line in done.stdout.splitlines())


def renewed(text: str) -> str:
    """A page with its blocks as their commands print them."""
    return BLOCK.sub(lambda found: f"{found[1]}{found[2]}{printed(found[1])}", text)


def main() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if (new := renewed(text)) != text:
            page.write_text(new, encoding="utf-8")
            print(page.relative_to(ROOT))


if __name__ == "__main__":
    no_options(__doc__)
    main()
