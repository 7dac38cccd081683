"""CUDA graphs: one way to capture."""

from collections.abc import Callable
from typing import Any

import torch


@torch.inference_mode(False)  # a graph's tensors must serve captures inside and outside of it
@torch.no_grad()
def capture(work: Callable[[], object], stream: torch.cuda.Stream, pool: Any = None) -> torch.cuda.CUDAGraph:
    """A graph of what `work` launches; nothing runs now, and other threads may use the device, but not this stream.
    pool: of memory that it shares with graphs that run before or after it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            work()
        finally:
            graph.capture_end()
    return graph
