"""`BatchAttention.run` without the host's time for it: a layer's launches, captured once in a CUDA graph."""

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from trunkattn.attention import BatchAttention, Plan

_MOST_GRAPHS: Final = 1024  # models have some hundred layers; more mean that caches come and go


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


def _place(value: Any) -> Any:
    """What a captured launch depends on."""
    return (value.data_ptr(), value.shape, value.stride(), value.dtype) if isinstance(value, torch.Tensor) else value


class CapturedRun:
    """`BatchAttention.run` for plans that every step fills anew, and layers whose q and out lie elsewhere each time.

    From Python a layer's launches take the host some hundred microseconds, which steps of few tokens do not hide. A
    graph repeats them on the tensors that it was captured with, so q is copied to where this object keeps it and the
    result from there. Layers are told apart by their plans and caches; each is captured when it comes for the second
    time. While another graph is captured, and on a CPU, this is `run` itself.

    Args:
        attention: with a capacity, unless it is on a CPU.
    """

    @torch.inference_mode(False)
    def __init__(self, attention: "BatchAttention") -> None:
        self._attention = attention
        self._graphs: OrderedDict[tuple[Any, ...], torch.cuda.CUDAGraph | None] = OrderedDict()
        if attention.device.type != "cuda":
            return
        if attention.capacity is None:
            raise ValueError("capacity=None: expected one, for plans that stay where they are")
        config, tokens = attention.config, attention.capacity.max_query_tokens
        self._q, self._out = (
            torch.zeros(tokens, config.num_qo_heads, dim, dtype=config.dtype, device=attention.device)
            for dim in (config.head_dim, config.value_dim)
        )
        self._stream = torch.cuda.Stream(attention.device)

    def __call__(
        self, plan: "Plan", q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, out: torch.Tensor,
        **options: Any,
    ) -> None:  # fmt: skip
        """Writes out [T, num_qo_heads, head_dim_v]; rows that are no query token's are undefined.

        Args:
            plan: one that later batches are planned into (`BatchAttention.plan(..., into=plan)`).
            q: [T, num_qo_heads, head_dim], T up to the capacity's max_query_tokens.
            k_cache, v_cache: as of `BatchAttention.run`; a layer's stay where they are.
            options: scales and sinks, likewise.

        Raises:
            ValueError, TypeError: as `BatchAttention.run`.
        """
        run = partial(self._attention.run, plan, k_cache=k_cache, v_cache=v_cache, return_lse=False, **options)
        if self._attention.device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            run(q=q, out=out)
            return
        rows = len(q) if isinstance(q, torch.Tensor) and q.dim() else 0
        own_q, own_out = self._q[:rows], self._out[:rows]
        if rows < plan.num_query_tokens or not (_alike(q, own_q) and _alike(out, own_out)):
            run(q=q, out=out)  # says what is wrong
            return
        layer = {"k_cache": k_cache, "v_cache": v_cache, **options}
        key = (plan, *((name, _place(value)) for name, value in sorted(layer.items())))
        with torch.cuda.device(q.device):
            own_q.copy_(q)
            self._repeat(key, partial(run, q=self._q, out=self._out))
            out.copy_(own_out)

    def _repeat(self, key: tuple[Any, ...], work: Callable[[], object]) -> None:
        """Runs the work; the first time as it is, which compiles it and checks what it is given."""
        if key not in self._graphs:
            work()
            self._graphs[key] = None
            if len(self._graphs) > _MOST_GRAPHS:
                self._graphs.popitem(last=False)
            return
        graph = self._graphs[key]
        if graph is None:
            pool = next((other.pool() for other in self._graphs.values() if other is not None), None)
            graph = self._graphs[key] = capture(work, self._stream, pool)
        graph.replay()


def _alike(given: Any, own: torch.Tensor) -> bool:
    """Whether one can be copied to the other as it is."""
    names = ("shape", "dtype", "device", "requires_grad")
    return isinstance(given, torch.Tensor) and all(getattr(given, name) == getattr(own, name) for name in names)
