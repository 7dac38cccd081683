"""A limit of processor time for a model's chat template."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

from trunkattn.server.lanes import Pause

_TEMPLATE_FILES: Final = ("<template>", "<unknown>")  # how Jinja names the code that it makes of a text


class TemplateTimeout(RuntimeError):
    """A template took too long."""


@contextmanager
def template_clock(seconds: float, pause: Pause) -> Iterator[None]:
    """Context in which a line of a template raises TemplateTimeout if it is reached after too much processor time of
    this thread. pause: called in every line, and in every call of a function."""
    deadline = time.thread_time() + seconds

    def on_line(frame: FrameType, event: str, argument: Any) -> Any:
        if time.thread_time() > deadline:
            raise TemplateTimeout(f"it takes longer than {seconds} s of a processor")
        pause()
        return on_line

    def on_call(frame: FrameType, event: str, argument: Any) -> Any:
        pause()
        return on_line if frame.f_code.co_filename in _TEMPLATE_FILES else None

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        yield
    finally:
        sys.settrace(before)
