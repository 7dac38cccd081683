"""CUDA graphs: one way to capture, and one to keep the graphs of work that comes again."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
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


class GraphCache:
    """Graphs of work that comes again and again on one device, at most so many: of more, those used least recently are
    dropped. They share their memory, as only one of them runs at a time.

    Args:
        device: a GPU.
        most_graphs: how many are kept.
    """

    def __init__(self, device: torch.device, most_graphs: int) -> None:
        self._most = most_graphs
        self._stream = torch.cuda.Stream(device)
        self._graphs: OrderedDict[Hashable, torch.cuda.CUDAGraph | None] = OrderedDict()

    def run(self, key: Hashable, work: Callable[[], object]) -> None:
        """Does the work that `key` stands for, on the current stream.

        The first time it runs as it is, which compiles its kernels and refuses wrong arguments. The second time it is
        captured, and from then on the graph is replayed.

        Args:
            key: what the work's launches depend on.
            work: launches kernels, without waiting for the device.
        """
        is_new = key not in self._graphs
        graph = self._graphs.pop(key, None)
        if is_new:
            work()
        elif graph is None:
            graph = capture(work, self._stream, self._pool())
        self._graphs[key] = graph  # as the one used last
        if len(self._graphs) > self._most:
            self._graphs.popitem(last=False)
        if graph is not None:
            graph.replay()

    def _pool(self) -> Any:
        return next((graph.pool() for graph in self._graphs.values() if graph is not None), None)
