"""Names that need no torch, so that a command can check them at once."""

from pathlib import Path
from types import MappingProxyType
from typing import Final

# How shared prefixes are packed (`trunkattn.planner.packs`), and how a GPU launches a step (`trunkattn.gpu.launch`)
POLICIES: Final = ("per_query", "relay", "cascade", "pat", "fasttree", "optimal", "auto")
EXECUTIONS: Final = ("auto", "serial", "overlapped", "streams")
# How command lines, vLLM's and SGLang's too, name an 8-bit KV cache, and torch's name of its dtype
FP8_CACHES: Final = MappingProxyType({"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"})


def install_command(extra: str = "") -> str:
    """The command that installs this package with an extra: in its checkout if it runs from there, else from a wheel.

    Example:
        >>> "[engine]" in install_command("engine")
        True
    """
    wanted = f"[{extra}]" if extra else ""
    is_checkout = (Path(__file__).parents[2] / "pyproject.toml").is_file()
    return f'pip install -e ".{wanted}"' if is_checkout else f'pip install "PATH_OF_THE_WHEEL{wanted}"'
