"""What test_apart.py calls in another process."""

import os
import time
from collections.abc import Iterator


def count(number: int) -> Iterator[tuple[int, int]]:
    """Numbers, and the process that counts."""
    for i in range(number):
        yield i, os.getpid()


def fail() -> Iterator[int]:
    yield 1
    raise ValueError("not here")


def die(code: int) -> Iterator[int]:
    yield 1
    os._exit(code)


def hang() -> Iterator[int]:
    yield 1
    time.sleep(600)
    yield 2
