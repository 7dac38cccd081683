"""One cell of a comparison in training: an attention's errors, peak memory and times of both passes.

Times are medians of replayed CUDA graphs, without Python. What cannot be captured is timed by events, with the device
held while the host queues; each cell says which. The backward pass is both passes less the forward pass. TFLOP/s count
2 products forward and 5 backward of what the mask leaves, whatever a kernel computes twice; of heads whose values have
another width, all of the mean width.
"""

import math
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch

from benchmarks.lib.report import time_ms

TOLERANCE = 0.06  # of the largest number: bf16 weights, and gradients that are sums of many
WORK = {"forward": 1.0, "backward": 2.5, "both": 3.5}
REPLAYS, WARM_UPS = 12, 2
CLOCK_HZ = 2e9  # at least that of a card: what holds the device so long
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]  # q, k, v -> out
Results = tuple[torch.Tensor, ...]


class Inputs(NamedTuple):
    """q, k and v, which gather gradients, and the gradient of the output."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor

    @property
    def leaves(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What gradients are taken of."""
        return self.q, self.k, self.v


def random_inputs(
    rows: tuple[int, ...],
    heads: tuple[int, int],
    head_dim: int,
    device: str,
    dtype: torch.dtype = torch.bfloat16,
    head_dim_v: int | None = None,
) -> Inputs:
    """Inputs [*rows, heads, head_dim], the same in every process. heads: of queries, and of keys and values.
    head_dim_v: of values; None for head_dim."""
    torch.manual_seed(0)
    width = head_dim_v or head_dim
    sizes = ((heads[0], head_dim), (heads[1], head_dim), (heads[1], width), (heads[0], width))
    q, k, v, dout = (torch.randn(*rows, *size, device=device).to(dtype) for size in sizes)
    return Inputs(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout)


def both_passes(attend: Attend, inputs: Inputs) -> Results:
    """out, dq, dk and dv."""
    out = attend(*inputs.leaves)
    return out, *torch.autograd.grad(out, inputs.leaves, inputs.dout)


def relative_error(found: Results, expected: Results) -> float:
    """The largest difference of any pair, of the largest number of the second one; NaN is an infinite error."""
    pairs = zip(found, expected[: len(found)], strict=True)
    errors = [float((a.detach().float() - b.float()).abs().max() / b.float().abs().max()) for a, b in pairs]
    return math.inf if any(math.isnan(error) for error in errors) else max(errors)


def measure(
    make: Callable[[], Attend],
    inputs: Inputs,
    error_of: Callable[[Results], float],
    gigaflops: float,
    trains: bool = True,
    timed: bool = True,
) -> dict[str, Any]:
    """A cell, or why there is none: `wrong` or `missing`.

    make: the attention; it may import what is not installed. error_of: what `relative_error` says of its results, which
    are only out unless it trains. timed: else the cell has no times.
    """
    try:
        attend = make()

        def forward() -> Results:
            return (attend(*inputs.leaves).detach(),)

        def both() -> Results:
            return both_passes(attend, inputs)

        error = error_of(both() if trains else forward())
        if error > TOLERANCE:
            return {"wrong": f"error {error:.3g}"}
        cell: dict[str, Any] = {"error": round(error, 5)}
        if trains and inputs.q.is_cuda:
            cell["peak_mb"] = round(peak_bytes(both, inputs) / 1e6, 1)
        return cell | (times(forward, both if trains else None, gigaflops) if timed else {})
    except Exception as reason:  # a peer that cannot run here is reported, not fatal
        return {"missing": f"{type(reason).__name__}: {str(reason)[:200]}"}
    finally:
        if inputs.q.is_cuda:
            torch.cuda.empty_cache()


def times(forward: Callable[[], Results], both: Callable[[], Results] | None, gigaflops: float) -> dict[str, Any]:
    """Milliseconds and TFLOP/s of each pass, and how they were timed."""
    found, ways = {}, []
    for name, call in (("forward", forward), ("both", both)):
        if call is not None:
            found[name], way = milliseconds(call)
            ways.append(way)
    if both is not None:
        found["backward"] = found["both"] - found["forward"]
    cell: dict[str, Any] = {
        name: {"ms": round(ms, 4), "tflops": round(gigaflops * WORK[name] / ms, 1)} for name, ms in found.items()
    }
    return cell | {"timed_by": max(ways)}  # a graph only if both are


def milliseconds(call: Callable[[], Results], replays: int = REPLAYS) -> tuple[float, str]:
    """The median of a call, and what timed it: a CUDA graph, events, or on a CPU the host's clock."""
    if not call()[0].is_cuda:
        return time_ms(call, 3, 1)["median_ms"], "host"
    try:
        return event_milliseconds(captured(call), replays), "graph"
    except Exception as reason:
        print(f"not captured in a graph: {type(reason).__name__}: {str(reason)[:100]}", flush=True)
        return event_milliseconds(call, replays), "events"


def event_milliseconds(call: Callable[[], object], replays: int) -> float:
    """The median of a call by events, with the device held while the host queues it; without a card by the clock."""
    if not torch.cuda.is_available():
        return time_ms(call, 3, 1)["median_ms"]
    begun = perf_counter()
    call()
    held = int(2 * (perf_counter() - begun) * CLOCK_HZ)
    taken = []
    for _ in range(WARM_UPS + replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(held)
        begin.record()
        call()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end))
    return median(taken[WARM_UPS:])


def captured(call: Callable[[], Results]) -> Callable[[], object]:
    """Replays a call from a CUDA graph.

    Raises:
        RuntimeError: the graph does not write the results, so it lacks kernels of the call.
    """
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # autograd runs a backward pass on the stream of its forward pass
        for _ in range(2):
            call()
    side.synchronize()
    with torch.cuda.graph(graph, stream=side):
        results = call()
    with torch.no_grad():
        for result in results:
            result.detach().fill_(math.nan)
    graph.replay()
    torch.cuda.synchronize()
    if any(bool(result.isnan().any()) for result in results):
        raise RuntimeError("the graph does not write the results")
    return graph.replay


def peak_bytes(call: Callable[[], object], inputs: Inputs) -> int:
    """What a call takes at its peak on a card, its inputs included."""
    own = sum(tensor.nbytes for tensor in inputs)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated() - own
    torch.cuda.reset_peak_memory_stats()
    call()
    return torch.cuda.max_memory_allocated() - before


def shown(cell: dict[str, Any]) -> str:
    """A cell in a few words."""
    if "forward" not in cell:
        return str(cell)
    parts = [f"{part} {cell[part]['ms']:.3f} ms {cell[part]['tflops']:.0f} TFLOP/s" for part in WORK if part in cell]
    return ", ".join(parts[:2]) + f" ({cell['timed_by']}, error {cell['error']})"
