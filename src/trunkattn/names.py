"""Names that need no torch, so that a command can check them at once."""

from pathlib import Path
from typing import Final

# How shared prefixes are packed (`trunkattn.planner.packs`), and how a GPU launches a step (`trunkattn.gpu.launch`)
POLICIES: Final = ("per_query", "relay", "cascade", "pat", "fasttree", "optimal", "auto")
EXECUTIONS: Final = ("auto", "serial", "overlapped", "streams")


def install_command(extra: str = "") -> str:
    """The command that installs this package with an extra: in its checkout if it runs from there, else from a wheel.

    Example:
        >>> "[engine]" in install_command("engine")
        True
    """
    wanted = f"[{extra}]" if extra else ""
    is_checkout = (Path(__file__).parents[2] / "pyproject.toml").is_file()
    return f'pip install -e ".{wanted}"' if is_checkout else f'pip install "PATH_OF_THE_WHEEL{wanted}"'
