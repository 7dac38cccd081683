"""Out-of-memory errors, replaced by one sentence about what needed the memory."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import torch

_ALLOCATION: Final = re.compile(r"(?:ried|nable) to allocate (\d[\d.]* \w+)")  # the size in messages of torch and NumPy
_CPU_MESSAGE: Final = "can't allocate memory"  # what torch raises on a CPU, as a plain RuntimeError


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, or its cause, is an out-of-memory error."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, RuntimeError) and _CPU_MESSAGE in str(error):
        return True
    return error.__cause__ is not None and is_out_of_memory(error.__cause__)


@contextmanager
def memory_for(message: Callable[[str], str]) -> Iterator[None]:
    """Context in which an out-of-memory error becomes a ValueError. message: returns its text, given the size of the
    failed allocation, such as "2.00 GiB"."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        texts = f"{error} {error.__cause__}"
        asked = _ALLOCATION.search(texts)
        raise ValueError(message(asked[1] if asked else "an unknown number of bytes")) from error
