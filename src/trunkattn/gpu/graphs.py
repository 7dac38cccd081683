"""CUDA graphs: captures work, and caches the graphs of work that recurs."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import torch


@torch.inference_mode(False)  # a graph's tensors must serve captures inside and outside of it
@torch.no_grad()
def capture(work: Callable[[], object], stream: torch.cuda.Stream, pool: Any = None) -> torch.cuda.CUDAGraph:
    """A graph of the launches of `work`. Nothing runs now, and other threads may use the device, but not this stream.
    pool: a memory pool that it shares with graphs that never run at the same time."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            work()
        finally:
            graph.capture_end()
    return graph


class GraphCache:
    """A cache of the graphs of recurring work on one device. It drops the least recently used ones. The graphs share
    their memory, because only one of them runs at a time.

    Args:
        device: a GPU.
        most_graphs: the most graphs that are kept.
    """

    def __init__(self, device: torch.device, most_graphs: int) -> None:
        self._most = most_graphs
        self._stream = torch.cuda.Stream(device)
        self._graphs: OrderedDict[Hashable, torch.cuda.CUDAGraph | None] = OrderedDict()

    def run(self, key: Hashable, work: Callable[[], object]) -> None:
        """Does the work that `key` stands for, on the current stream.

        The first time, `work` is called directly, which compiles its kernels and refuses wrong arguments. The second
        time it is captured, and from then on its graph is replayed.

        Args:
            key: everything that the launches of `work` depend on.
            work: launches kernels, without waiting for the device.
        """
        is_new = key not in self._graphs
        graph = self._graphs.pop(key, None)
        if is_new:
            work()
        elif graph is None:
            graph = capture(work, self._stream, self._pool())
        self._graphs[key] = graph  # now the most recently used
        if len(self._graphs) > self._most:
            self._graphs.popitem(last=False)
        if graph is not None:
            graph.replay()

    def _pool(self) -> Any:
        return next((graph.pool() for graph in self._graphs.values() if graph is not None), None)
