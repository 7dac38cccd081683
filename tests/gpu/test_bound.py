"""Launches that are bound once: what a later layer brings, what it does not, and when launches are bound anew."""

from dataclasses import replace

import torch

from trunkattn.gpu.bound import layer_key

from .bound_cases import Kernel, bound
from .hopper_cases import make_tensors


def test_the_first_call_goes_through_triton_and_others_do_not() -> None:
    kernel, first, second = Kernel(), make_tensors(), make_tensors()
    launches = bound(kernel, first)
    launches(first)
    assert [grid for grid, _ in kernel.calls] == [(7, 1, 1), (9, 1, 1)]
    assert kernel.calls[1][1] == {"work": "more", "layer": first.q, "SIZE": 3, "scale": first.v_scale, "num_warps": 4}
    launches(second)
    launches(first)
    assert len(kernel.calls) == 2
    assert [call[:2] for call in kernel.compiled.calls] == [((7, 1, 1), "list"), ((9, 1, 1), "more")] * 2
    for call, t in zip(kernel.compiled.calls, (second, second, first, first), strict=True):
        assert call[2] is t.q and call[3] == 3 and call[4] is t.v_scale


def test_the_interpreter_is_called_each_time() -> None:
    kernel, t = Kernel(interprets=True), make_tensors()
    launches = bound(kernel, t)
    launches(t)
    launches(t)
    assert len(kernel.calls) == 4 and not kernel.compiled.calls


def test_no_tensor_of_a_layer_is_kept() -> None:
    t = make_tensors()
    launches = bound(Kernel(), t)
    for _ in range(2):  # the second call bypasses Triton
        launches(t)
    kept = [value for launch in launches._launches for value in (*launch._fixed.values(), *launch._positional)]
    assert not any(value is t.q or value is t.v_scale or value == "the first layer's" for value in kept)


def test_layers_of_one_kind_have_one_key() -> None:
    t = make_tensors()
    assert layer_key(t, False) == layer_key(make_tensors(), False)
    odd = torch.zeros(t.q.numel() + 1, dtype=t.q.dtype)[1:].view(t.q.shape)
    rope = torch.zeros(64, 8, 128, dtype=t.q.dtype)
    others = (
        replace(t, q=odd),
        replace(t, q=t.q.to(torch.float16)),
        replace(t, out=torch.empty(128, 8, 128, dtype=t.out.dtype)[::2]),
        replace(t, k_cache=t.k_cache.transpose(1, 2)),
        replace(t, v_cache=t.v_cache.transpose(1, 2)),
        replace(t, q_rope=rope),
        replace(t, q_rope=rope.transpose(0, 1)),
        replace(t, sinks=torch.zeros(3)[1:]),
    )
    keys = {layer_key(other, False) for other in others} | {layer_key(t, True), layer_key(t, False)}
    assert len(keys) == len(others) + 2
