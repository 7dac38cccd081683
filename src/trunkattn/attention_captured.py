"""`BatchAttention.run` without the host's time for it: a layer's launches, captured once in a CUDA graph."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from trunkattn.attention import Plan

_MOST_GRAPHS: Final = 1024  # models have some hundred layers; more mean that caches come and go


def capture(work: Callable[[], object], pool: Any = None) -> torch.cuda.CUDAGraph:
    """A graph of what `work` launches; nothing runs now, and other threads may use the device meanwhile. pool: of
    memory, for graphs of which one at a time is replayed."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
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
    """Runs a plan that every step fills anew, for layers whose q and out lie elsewhere in every step.

    From Python a layer's launches take the host some hundred microseconds, which steps of few tokens do not hide. A
    graph repeats them on the tensors that it was captured with, so q is copied to where this object keeps it and the
    result from there. Layers are told apart by their caches; each is captured when it comes for the second time. While
    another graph is captured, and on a CPU, this is `BatchAttention.run`.

    Args:
        plan: with a capacity, the one that later batches are planned into (`BatchAttention.plan(..., into=plan)`).
    """

    def __init__(self, plan: "Plan") -> None:
        self.plan = plan
        self._own: tuple[torch.Tensor, torch.Tensor, Any] | None = None  # q, out, pool of memory
        self._graphs: dict[tuple[Any, ...], torch.cuda.CUDAGraph | None] = {}

    def __call__(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, out: torch.Tensor, **options: Any
    ) -> None:
        """Writes out [T, num_qo_heads, head_dim_v], of q [T, num_qo_heads, head_dim], T up to the capacity's
        max_query_tokens. options: scales and sinks, as of `BatchAttention.run`; a layer's stay where they are.

        Raises:
            ValueError, TypeError: as `BatchAttention.run`.
        """
        run = partial(self.plan.owner.run, self.plan, k_cache=k_cache, v_cache=v_cache, **options)
        if not q.is_cuda or torch.cuda.is_current_stream_capturing():
            run(q=q, out=out)
            return
        whole_q, whole_out, pool = self._own = self._own or self._tensors(q.device)
        own_q, own_out = whole_q[: len(q)], whole_out[: len(q)]
        if (q.shape, q.dtype, out.shape, out.dtype) != (own_q.shape, own_q.dtype, own_out.shape, own_out.dtype):
            run(q=q, out=out)  # says what is wrong
            return
        own_q.copy_(q)
        with torch.cuda.device(q.device):
            key = tuple(map(_place, (k_cache, v_cache, *options.values())))
            self._repeat(key, partial(run, q=whole_q, out=whole_out), pool)
        out.copy_(own_out)

    def _repeat(self, key: tuple[Any, ...], work: Callable[[], object], pool: Any) -> None:
        """Runs the work; the first time as it is, which compiles it and checks what it is given."""
        if key not in self._graphs:
            work()
            if len(self._graphs) >= _MOST_GRAPHS:
                self._graphs.clear()
            self._graphs[key] = None
            return
        graph = self._graphs[key] = self._graphs[key] or capture(work, pool)
        graph.replay()

    @torch.inference_mode(False)  # they serve steps inside and outside of it
    def _tensors(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, Any]:
        config, capacity = self.plan.owner.config, self.plan.owner.capacity
        if capacity is None:
            raise ValueError("plan of a BatchAttention with capacity=None: expected one that stays where it is")
        q, out = (
            torch.zeros(capacity.max_query_tokens, config.num_qo_heads, dim, dtype=config.dtype, device=device)
            for dim in (config.head_dim, config.value_dim)
        )
        return q, out, torch.cuda.graph_pool_handle()
