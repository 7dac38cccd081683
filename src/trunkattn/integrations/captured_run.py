"""`BatchAttention.run` in less time of the host: the launches of each layer are captured once in a CUDA graph."""

from functools import partial
from typing import Any, Final

import torch

from trunkattn.attention import BatchAttention, Plan
from trunkattn.gpu.graphs import GraphCache

_MOST_GRAPHS: Final = 1024  # models have some hundred layers; more graphs belong to caches that are gone


def _place(value: Any) -> Any:
    """The properties of an argument that a captured launch depends on."""
    return (value.data_ptr(), value.shape, value.stride(), value.dtype) if isinstance(value, torch.Tensor) else value


class CapturedRun:
    """`BatchAttention.run` for plans that every step refills, and layers whose q and out have new addresses each time.

    To launch a layer's kernels from Python takes some hundred microseconds, longer than a step of few tokens takes the
    GPU. A graph launches them at once, but always on the tensors that it was captured with. So q is copied to a tensor
    of this object, and the result is copied from another one. A layer is known by its plan and caches, and is captured
    at its second call. This is plain `run` while another graph is captured, for steps of more tokens, and on a CPU.

    Args:
        attention: has a capacity, unless it is on a CPU.
        chunk_tokens: room for tokens of prompt chunks, in addition to the capacity's max_query_tokens. With more tokens
            a graph saves nothing, because the GPU takes longer than the host.
    """

    @torch.inference_mode(False)
    def __init__(self, attention: BatchAttention, chunk_tokens: int = 0) -> None:
        self._attention = attention
        if attention.device.type != "cuda":
            return
        if attention.capacity is None:
            raise ValueError("capacity=None: expected one, for plans that stay where they are")
        config, tokens = attention.config, attention.capacity.max_query_tokens + chunk_tokens
        self._q, self._out = (
            torch.zeros(tokens, config.num_qo_heads, dim, dtype=config.dtype, device=attention.device)
            for dim in (config.head_dim, config.value_dim)
        )
        self._graphs = GraphCache(attention.device, _MOST_GRAPHS)

    def __call__(
        self,
        plan: Plan,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        k_cache: torch.Tensor,
        v_cache: torch.Tensor | None,
        out: torch.Tensor,
        **options: Any,
    ) -> None:
        """Writes out [T, num_qo_heads, head_dim_v]; rows that are no query token's are undefined.

        Args:
            plan: one that later batches are planned into (`BatchAttention.plan(..., into=plan)`).
            q: [T, num_qo_heads, head_dim], or the pair that latent attention takes.
            k_cache, v_cache: see `BatchAttention.run`. The caches of a layer must keep their addresses.
            options: scales and sinks of `BatchAttention.run`.

        Raises:
            ValueError, TypeError: as `BatchAttention.run`.
        """
        run = partial(self._attention.run, plan, k_cache=k_cache, v_cache=v_cache, return_lse=False, **options)
        if self._attention.device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            run(q=q, out=out)
            return
        rows = len(out) if isinstance(out, torch.Tensor) and out.dim() else 0
        own_out = self._out[:rows]
        pairs = self._pairs(q, rows)
        if rows < plan.num_query_tokens or not all(_alike(given, own) for given, own in (*pairs, (out, own_out))):
            run(q=q, out=out)  # has more tokens, or says what is wrong
            return
        layer = {"k_cache": k_cache, "v_cache": v_cache, **options}
        key = (plan, *((name, _place(value)) for name, value in sorted(layer.items())))
        with torch.cuda.device(out.device):
            for given, own in pairs:
                own.copy_(given)
            self._graphs.run(key, partial(run, q=self._q, out=self._out))
            out.copy_(own_out)

    def _pairs(self, q: Any, rows: int) -> list[tuple[Any, torch.Tensor]]:
        """Returns each tensor of q with its place."""
        own, width = self._q[:rows], self._attention.config.value_dim
        is_pair = isinstance(q, tuple) and len(q) == 2
        return [(q[0], own[..., :width]), (q[1], own[..., width:])] if is_pair else [(q, own)]


def _alike(given: Any, own: torch.Tensor) -> bool:
    """Whether one can be copied to the other as it is."""
    names = ("shape", "dtype", "device", "requires_grad")
    return isinstance(given, torch.Tensor) and all(getattr(given, name) == getattr(own, name) for name in names)
