"""A model that a command loads: what it is called, where it runs, its threads, and the progress line meanwhile."""

import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from trunkattn.engine import LLM


def name_of(model: Path) -> str:
    """What a model is called: its folder, also where the path is `.` or `..`, or its file without `.gguf`. Dots in the
    name of a folder are part of it, as in Qwen2.5-0.5B."""
    return os.path.basename(os.path.abspath(model)).removesuffix(".gguf")


@contextlib.contextmanager
def working(console: "Console", text: str) -> Iterator[None]:
    """Shows a line with the elapsed time during a long task, and hides the progress bars of other libraries."""
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(finished_text="✓"), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress, contextlib.redirect_stderr(io.StringIO()):
        task = progress.add_task(text, total=1)
        yield
        progress.update(task, completed=1)


def use_threads(threads: int | None) -> None:
    """Lets torch and the CPU kernels compute with this many threads, whichever thread of Python calls."""
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def place(llm: "LLM") -> str:
    """Where a model runs and in which type, in words, such as "the CPU in float32"."""
    import torch

    from trunkattn.dtypes import dtype_name

    device = llm.info.device
    name = "the CPU" if device.type == "cpu" else f"{device} ({torch.cuda.get_device_name(device)})"
    return f"{name} in {dtype_name(llm.info.dtype)}"
