"""Bad input raises an error that names the argument and its value, and leaves everything usable."""

import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from trunkattn import AttentionConfig, BatchAttention, Capacity, Plan, layer_inputs, validate

GOOD = AttentionConfig(num_qo_heads=4, num_kv_heads=2, head_dim=16, page_size=4, dtype=torch.float32)
NUM_PAGES = 8


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


# Two requests of 5 and 16 tokens; one and two query tokens.
TABLE = torch.arange(8, dtype=torch.int32).view(2, 4)
STEP: dict[str, Any] = {"block_table": TABLE, "seq_lens": int32(5, 16), "query_start_loc": int32(0, 1, 3)}
Q = torch.randn(3, 4, 16, generator=torch.Generator().manual_seed(0))
CACHE = torch.randn(NUM_PAGES, 4, 2, 16, generator=torch.Generator().manual_seed(1))
RUN: dict[str, Any] = {"q": Q, "k_cache": CACHE, "v_cache": CACHE}


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"num_qo_heads": 0}, ValueError, "num_qo_heads=0: expected an integer of at least 1"),
        ({"num_qo_heads": 5}, ValueError, "num_qo_heads=5: expected a multiple of num_kv_heads=2"),
        ({"num_qo_heads": "4"}, TypeError, "num_qo_heads='4': expected an int"),
        ({"num_kv_heads": -1}, ValueError, "num_kv_heads=-1"),
        ({"num_kv_heads": 2.0}, TypeError, r"num_kv_heads=2\.0: expected an int"),
        ({"head_dim": 0}, ValueError, "head_dim=0"),
        ({"head_dim": True}, TypeError, "head_dim=True: expected an int"),
        ({"page_size": 0}, ValueError, "page_size=0"),
        ({"page_size": None}, TypeError, "page_size=None"),
        ({"page_size": 2**31}, ValueError, "page_size=2147483648: expected at most 2147483647"),
        ({"dtype": torch.float64}, ValueError, r"dtype=torch\.float64: expected one of torch\.float32"),
        ({"dtype": None}, ValueError, "dtype=None"),
        ({"head_dim_v": 0}, ValueError, "head_dim_v=0"),
        ({"head_dim_v": 1.5}, TypeError, r"head_dim_v=1\.5"),
        ({"kv_dtype": torch.int8}, ValueError, r"kv_dtype=torch\.int8: expected None or one of torch\.float32"),
        ({"dtype": "float32"}, ValueError, r"^dtype='float32': expected one of torch\.float32"),
        ({"kv_dtype": "float16"}, ValueError, r"^kv_dtype='float16': expected None or one of torch\.float32"),
        ({"kv_dtype": ["fp8"]}, ValueError, r"kv_dtype=\['fp8'\]"),
        ({"sm_scale": 0.0}, ValueError, r"sm_scale=0\.0: expected None or a number from"),
        ({"sm_scale": math.nan}, ValueError, "sm_scale=nan"),
        ({"sm_scale": "0.1"}, TypeError, r"sm_scale='0\.1': expected None or a number"),
        ({"logits_soft_cap": -1.0}, ValueError, r"logits_soft_cap=-1\.0"),
        ({"logits_soft_cap": math.inf}, ValueError, "logits_soft_cap=inf"),
        ({"logits_soft_cap": 1e-60}, ValueError, "logits_soft_cap=1e-60: expected .* the range of float32"),
        (
            {"logits_soft_cap": 3e38},
            ValueError,
            r"logits_soft_cap=3e\+38: .*to 1\.7e\+38, the range of float32 in base 2",
        ),
        ({"num_qo_heads": 2**70}, ValueError, "num_qo_heads=1180591620717411303424: expected at most 2147483647"),
        ({"head_dim": 2**31}, ValueError, "head_dim=2147483648: expected at most 2147483647"),
        ({"head_dim_v": 2**40}, ValueError, "head_dim_v=1099511627776: expected at most 2147483647"),
        ({"sm_scale": 10**400}, ValueError, "sm_scale=10000.*: expected .* the range of float32"),
        ({"sm_scale": True}, TypeError, "sm_scale=True: expected None or a number"),
        ({"logits_soft_cap": torch.tensor(3.0)}, TypeError, r"logits_soft_cap=tensor\(3\.\)"),
        ({"sinks": 1}, TypeError, "sinks=1: expected a bool"),
        ({"policy": "best"}, ValueError, "policy='best': expected one of per_query, relay, cascade, pat"),
        ({"policy": None}, ValueError, "policy=None"),
        ({"batch_invariant": None}, TypeError, "batch_invariant=None: expected a bool"),
    ],
)
def test_a_bad_configuration_is_refused(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        replace(GOOD, **changed)


@pytest.mark.parametrize("name", ["max_requests", "max_query_tokens", "max_pages_per_request", "num_pages"])
@pytest.mark.parametrize("value", [0, -3, 2**31, 2**40, 2.0, True])
def test_a_bad_capacity_is_refused(name: str, value: Any) -> None:
    sizes = {"max_requests": 1, "max_query_tokens": 1, "max_pages_per_request": 1, "num_pages": 1}
    with pytest.raises(ValueError if type(value) is int else TypeError, match=f"{name}={value}: expected"):
        Capacity(**(sizes | {name: value}))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((GOOD, "meta"), ValueError, "device meta: expected cpu"),
        ((GOOD, "cuda"), ValueError, "device cuda: torch finds no CUDA device; use the device cpu, or"),
        ((GOOD, "quantum"), ValueError, "device='quantum': expected a torch.device"),
        ((GOOD, 3.5), ValueError, r"device=3\.5"),
        (({"head_dim": 16}, "cpu"), TypeError, "config is a dict: expected an AttentionConfig"),
        ((GOOD, "cpu", 4), TypeError, "capacity is an int: expected a Capacity or None"),
    ],
)
def test_a_bad_constructor_call_is_refused(arguments: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        BatchAttention(*arguments)


def test_a_gpu_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert GOOD.supports("cuda:2") == ["device cuda: torch finds 2 CUDA devices, numbered from 0"]


def test_a_gpu_without_a_number_is_the_one_that_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans lie there, so a layer on another GPU is refused, also if that one is current by then."""
    made: list[torch.device] = []
    source = SimpleNamespace(make=lambda config, device, capacity: made.append(device))
    monkeypatch.setattr(AttentionConfig, "supports", lambda self, device: [])
    monkeypatch.setattr("trunkattn.attention.import_module", lambda name: source)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    attention = BatchAttention(GOOD)
    assert made == [attention.device] == [torch.device("cuda:1")]
    with FakeTensorMode():
        far = {name: torch.empty(tensor.shape, device="cuda:0") for name, tensor in RUN.items()}
        with pytest.raises(ValueError, match="q is on cuda:0: expected cuda:1, like the BatchAttention"):
            attention.run(Plan(SimpleNamespace(num_query_tokens=3), attention, 7, 0), **far)


def test_supports_names_what_is_missing() -> None:
    assert GOOD.supports("cpu") == []
    (reason,) = GOOD.supports(torch.device("meta"))
    assert reason == "device meta: expected cpu or cuda"


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"block_table": [[0]]}, TypeError, "block_table is a list: expected a torch.Tensor"),
        (
            {"block_table": TABLE.long()},
            TypeError,
            r"dtype torch\.int64: expected torch\.int32; use block_table\.int\(\)",
        ),
        ({"block_table": TABLE[0]}, ValueError, r"block_table has shape \(4,\): expected \(num_requests, max_pages\)"),
        ({"block_table": TABLE.to("meta")}, ValueError, "block_table is on meta: expected cpu"),
        ({"block_table": TABLE - 1}, ValueError, r"block_table\[0, 0\]=-1: expected a page id from 0"),
        ({"block_table": TABLE * 2, "num_pages": 8}, ValueError, r"block_table\[1, 0\]=8: .*from 0 to 7"),
        ({"block_table": TABLE.to_sparse()}, ValueError, r"block_table has layout torch\.sparse_coo: expected a dense"),
        ({"seq_lens": torch.nested.nested_tensor([int32(5), int32(16)])}, ValueError, "seq_lens is nested"),
        ({"seq_lens": np.array([5, 16])}, TypeError, "seq_lens is an ndarray"),
        ({"seq_lens": int32(5, 16).float()}, TypeError, r"seq_lens has dtype torch\.float32"),
        ({"seq_lens": int32(5, 16, 1)}, ValueError, r"seq_lens has shape \(3,\): expected \(num_requests=2\)"),
        ({"seq_lens": int32(5, 16).to("meta")}, ValueError, "seq_lens is on meta"),
        ({"seq_lens": int32(-1, 16)}, ValueError, r"seq_lens\[0\]=-1: expected at least 1, for it counts"),
        ({"seq_lens": int32(5, 1)}, ValueError, r"seq_lens\[1\]=1: expected at least 2, for it counts"),
        ({"seq_lens": int32(5, 17)}, ValueError, r"seq_lens\[1\]=17: expected at most 16"),
        ({"seq_lens": int32(5, 2**31 - 1)}, ValueError, r"seq_lens\[1\]=2147483647: expected at most 16"),
        ({"query_start_loc": (0, 1, 3)}, TypeError, "query_start_loc is a tuple"),
        ({"query_start_loc": torch.tensor([0, 1, 3])}, TypeError, r"query_start_loc has dtype torch\.int64"),
        ({"query_start_loc": int32(0, 1)}, ValueError, r"query_start_loc .*: expected \(num_requests \+ 1=3\)"),
        ({"query_start_loc": int32(0, 1, 3).to("meta")}, ValueError, "query_start_loc is on meta"),
        ({"query_start_loc": int32(1, 2, 3)}, ValueError, r"query_start_loc\[0\]=1: expected 0"),
        ({"query_start_loc": int32(0, 2, 1)}, ValueError, r"query_start_loc\[2\]=1: expected at least 2"),
        ({"query_start_loc": int32(0, -1, 1)}, ValueError, r"query_start_loc\[1\]=-1: expected at least 0"),
        ({"sliding_window": 0}, ValueError, "sliding_window=0: expected an integer of at least 1"),
        ({"sliding_window": -5}, ValueError, "sliding_window=-5"),
        ({"sliding_window": 16.0}, TypeError, r"sliding_window=16\.0: expected an int"),
        ({"num_pages": 0}, ValueError, "num_pages=0"),
        ({"num_pages": "8"}, TypeError, "num_pages='8'"),
    ],
)
def test_a_bad_step_is_refused(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    attention = BatchAttention(GOOD, "cpu")
    plan = attention.plan(**STEP)
    with pytest.raises(error, match=message):
        attention.plan(**(STEP | changed))
    again = attention.plan(**STEP)
    assert again.step.planned.work.equals(plan.step.planned.work)
    assert torch.equal(attention.run(again, **RUN), attention.run(plan, **RUN))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ({"max_requests": 1}, "block_table rows: 2 is over the capacity, max_requests=1"),
        ({"max_query_tokens": 2}, "query tokens in query_start_loc: 3 is over the capacity, max_query_tokens=2"),
        ({"max_pages_per_request": 3}, "block_table columns: 4 is over the capacity, max_pages_per_request=3"),
        ({"num_pages": 7}, r"block_table\[1, 3\]=7: .*from 0 to 6, for seq_lens\[1\]=16 reaches"),
    ],
)
def test_a_step_over_the_capacity_is_refused(limit: dict[str, int], message: str) -> None:
    sizes = {"max_requests": 2, "max_query_tokens": 3, "max_pages_per_request": 4, "num_pages": 8}
    BatchAttention(GOOD, "cpu", Capacity(**sizes)).plan(**STEP)
    with pytest.raises(ValueError, match=message):
        BatchAttention(GOOD, "cpu", Capacity(**(sizes | limit))).plan(**STEP)


def test_num_pages_is_checked_besides_the_capacity() -> None:
    attention = BatchAttention(GOOD, "cpu", Capacity(2, 3, 4, 100))
    with pytest.raises(ValueError, match=r"block_table\[1, 0\]=4: expected a page id from 0 to 3"):
        attention.plan(**STEP, num_pages=4)


def test_a_plan_of_another_object_is_refused() -> None:
    attention, other = BatchAttention(GOOD, "cpu"), BatchAttention(GOOD, "cpu")
    plan = other.plan(**STEP)
    with pytest.raises(ValueError, match="plan belongs to another BatchAttention: expected a plan made by this one"):
        attention.run(plan, **RUN)
    assert torch.isfinite(other.run(plan, **RUN)).all()  # type: ignore[arg-type]


def learnable(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone().requires_grad_()


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"plan": None}, TypeError, "plan is None: expected a Plan"),
        ({"q": Q.numpy()}, TypeError, "q is an ndarray"),
        ({"q": Q[:2]}, ValueError, r"q .*: expected \(num_query_tokens=3, num_qo_heads=4, head_dim=16\)"),
        ({"q": Q.view(3, 64)}, ValueError, r"q has shape \(3, 64\)"),
        ({"q": Q.bfloat16()}, TypeError, r"q has dtype torch\.bfloat16: expected torch\.float32"),
        ({"q": Q.to("meta")}, ValueError, "q is on meta: expected cpu"),
        ({"q": learnable(Q)}, ValueError, "q requires grad"),
        ({"q": Q.to_sparse()}, ValueError, r"q has layout torch\.sparse_coo: expected a dense tensor"),
        ({"q": torch.nested.nested_tensor(list(Q))}, ValueError, "q is nested: expected a dense tensor"),
        ({"k_cache": CACHE.to_sparse()}, ValueError, r"k_cache has layout torch\.sparse_coo"),
        ({"v_cache": CACHE.to_mkldnn()}, ValueError, r"v_cache has layout torch\._mkldnn: expected a dense tensor"),
        ({"k_scale": torch.ones(2).to_sparse()}, ValueError, r"k_scale has layout torch\.sparse_coo"),
        ({"k_cache": None}, TypeError, "k_cache is None"),
        ({"k_cache": CACHE.half()}, TypeError, r"k_cache has dtype torch\.float16: expected torch\.float32"),
        ({"k_cache": CACHE[:, :3]}, ValueError, r"k_cache .*: expected \(num_pages, page_size=4, num_kv_heads=2, head"),
        ({"k_cache": CACHE[:, :, :1]}, ValueError, r"k_cache has shape \(8, 4, 1, 16\)"),
        ({"k_cache": CACHE.mT.contiguous().mT}, ValueError, r"k_cache has strides \(128, 32, 1, 2\): expected"),
        ({"k_cache": CACHE.to("meta")}, ValueError, "k_cache is on meta"),
        ({"k_cache": learnable(CACHE)}, ValueError, "k_cache requires grad"),
        ({"k_cache": CACHE[:7], "v_cache": CACHE[:7]}, ValueError, "k_cache has 7 pages: expected more than .* page 7"),
        ({"v_cache": CACHE[:7]}, ValueError, r"v_cache .*: expected \(num_pages=8, page_size=4, num_kv_heads=2"),
        ({"v_cache": CACHE[..., :8]}, ValueError, r"v_cache has shape \(8, 4, 2, 8\)"),
        ({"v_cache": CACHE.double()}, TypeError, r"v_cache has dtype torch\.float64"),
        ({"v_cache": CACHE.to("meta")}, ValueError, "v_cache is on meta"),
        ({"v_cache": CACHE.mT.contiguous().mT}, ValueError, "v_cache has strides"),
        (
            {"out": torch.empty(3, 4, 8)},
            ValueError,
            r"out .*: expected \(num_query_tokens=3, num_qo_heads=4, head_dim_v=16",
        ),
        ({"out": torch.empty(3, 4, 16).half()}, TypeError, r"out has dtype torch\.float16"),
        ({"out": Q.to("meta")}, ValueError, "out is on meta"),
        ({"out": learnable(Q)}, ValueError, "out requires grad"),
        ({"out": torch.empty(3, 1, 16).expand(3, 4, 16)}, ValueError, r"out has strides \(16, 0, 1\)"),
        ({"out": torch.empty(120).as_strided((3, 4, 16), (32, 8, 1))}, ValueError, "expected no two elements in one"),
        ({"q_scale": "1"}, TypeError, "q_scale is a str: expected a number, a tensor or None"),
        ({"return_lse": "no"}, TypeError, "return_lse='no': expected a bool"),
        ({"q_scale": True}, TypeError, "q_scale is a bool"),
        ({"v_scale": 1e300}, ValueError, r"v_scale=1e\+300: expected finite numbers in the range of float32"),
        ({"v_scale": torch.tensor([1e300]).double() * 1e300}, ValueError, "v_scale=tensor.*the range of float32"),
        ({"k_scale": -(10**400)}, ValueError, "k_scale=-10000.*: expected finite numbers"),
        (
            {"q_scale": 1e30, "k_scale": 1e30},
            ValueError,
            r"k_scale=1e\+30, .*: expected scales whose product is in the range",
        ),
        ({"q_scale": math.nan}, ValueError, "q_scale=nan: expected finite numbers"),
        ({"k_scale": [1.0, 2.0]}, TypeError, "k_scale is a list"),
        ({"k_scale": torch.ones(4)}, ValueError, "k_scale has 4 elements: expected 1 or num_kv_heads=2"),
        ({"k_scale": torch.tensor([1.0, math.inf])}, ValueError, "k_scale=tensor.*expected finite numbers"),
        ({"v_scale": torch.ones(1).to("meta")}, ValueError, "v_scale is on meta"),
        ({"v_scale": torch.ones(2, dtype=torch.int64)}, TypeError, r"v_scale has dtype torch\.int64"),
        ({"sinks": torch.zeros(4)}, ValueError, "sinks is given: the configuration has sinks=False"),
    ],
)
def test_a_bad_run_is_refused(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    attention = BatchAttention(GOOD, "cpu")
    arguments: dict[str, Any] = {"plan": attention.plan(**STEP), **RUN}
    expected, out = attention.run(**arguments), torch.full((3, 4, 16), math.nan)
    with pytest.raises(error, match=message):
        attention.run(**({**arguments, "out": out} | changed))
    assert out.isnan().all(), "nothing was computed"
    assert torch.equal(attention.run(**arguments, out=out), expected)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sinks", "error", "message"),
    [
        (None, ValueError, "sinks is missing: the configuration has sinks=True"),
        ([0.0] * 4, TypeError, "sinks is a list"),
        (torch.zeros(2), ValueError, r"sinks has shape \(2,\): expected \(num_qo_heads=4\)"),
        (torch.zeros(4, dtype=torch.int32), TypeError, r"sinks has dtype torch\.int32: expected a floating dtype"),
        (
            torch.zeros(4).to(torch.float8_e5m2),
            TypeError,
            r"sinks has dtype torch\.float8_e5m2: expected .* 16 bits or more",
        ),
        (torch.zeros(4).to("meta"), ValueError, "sinks is on meta"),
        (torch.nn.Parameter(torch.zeros(4)), ValueError, "sinks requires grad"),
    ],
)
def test_bad_sinks_are_refused(sinks: Any, error: type[Exception], message: str) -> None:
    attention = BatchAttention(replace(GOOD, sinks=True), "cpu")
    plan = attention.plan(**STEP)
    with pytest.raises(error, match=message):
        attention.run(plan, **RUN, sinks=sinks)
    assert torch.isfinite(attention.run(plan, **RUN, sinks=torch.zeros(4))).all()  # type: ignore[arg-type]


def test_numpy_numbers_become_pythons_own() -> None:
    small = {"num_qo_heads": np.uint8(200), "num_kv_heads": np.uint8(100), "head_dim": np.uint8(128)}
    config = AttentionConfig(
        **small, page_size=np.uint8(16), dtype=torch.float32, sm_scale=np.float32(0.5), logits_soft_cap=np.float16(20)
    )
    assert {type(value) for name, value in vars(config).items() if name in (*small, "page_size")} == {int}
    assert (config.sm_scale, config.logits_soft_cap) == (0.5, 20.0) and type(config.sm_scale) is float
    capacity = Capacity(np.uint8(200), np.uint8(200), np.uint8(200), np.uint8(200), max_query_len=np.uint8(3))
    assert {type(value) for value in vars(capacity).values()} == {int}
    attention = BatchAttention(GOOD, "cpu")
    plans = [
        attention.plan(**STEP, sliding_window=window, num_pages=pages)
        for window, pages in ((3, 8), map(np.uint8, (3, 8)))
    ]
    assert torch.equal(*(attention.run(plan, **RUN) for plan in plans))


def test_an_integer_of_thousands_of_digits_is_named_by_its_size() -> None:
    with pytest.raises(ValueError, match=r"head_dim=-\(an integer of 16610 bits\): expected an integer of at least 1"):
        replace(GOOD, head_dim=-(10**5000))
    with pytest.raises(ValueError, match=r"sm_scale=\(an integer of 16610 bits\): expected None or a number"):
        replace(GOOD, sm_scale=10**5000)


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "out"])
def test_a_view_that_torch_negates_when_it_reads_it_is_named(name: str) -> None:
    """Kernels read memory: the imaginary part of a conjugate would have the wrong sign."""
    attention = BatchAttention(GOOD, "cpu")
    plan = attention.plan(**STEP)
    given = {**RUN, "out": torch.empty_like(Q)}
    lazy = torch.complex(torch.zeros_like(given[name]), -given[name]).conj().imag
    assert torch.equal(lazy, given[name]) or name == "out"
    with pytest.raises(ValueError, match=rf"{name} is a view that torch negates .*; use {name}\.resolve_neg\(\)"):
        attention.run(plan, **{**given, name: lazy})
    if name != "out":
        resolved = {**given, name: lazy.resolve_neg()}
        if name != "q":
            resolved[name] = resolved[name].contiguous()
        assert torch.equal(attention.run(plan, **resolved), attention.run(plan, **RUN))


def beside(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A tensor in a larger buffer, an output in the same buffer that is apart, and one that takes a number of it."""
    if tensor.dim() == 1:
        buffer = torch.zeros(200)
        view, apart, across = buffer[: len(tensor)], buffer[len(tensor) :], buffer[len(tensor) - 1 :]
        apart, across = (each[:192].view(Q.shape) for each in (apart, across))
    else:
        buffer = torch.zeros(*tensor.shape[:-1], 32)  # each row of the output is between two rows of the tensor
        rows = buffer.view(len(buffer), -1, 32)[:3, :4]
        view, apart, across = buffer[..., :16], rows[..., 16:], rows[..., 15:31]
    return view.copy_(tensor), apart, across


def test_an_out_that_is_the_queries_is_refused() -> None:
    attention = BatchAttention(GOOD, "cpu")
    with pytest.raises(ValueError, match="out lies in the memory of q: expected memory of its own"):
        attention.run(attention.plan(**STEP), **RUN, out=RUN["q"])


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "k_scale", "sinks"])
def test_an_out_in_memory_that_is_read_is_refused(name: str) -> None:
    attention = BatchAttention(replace(GOOD, sinks=True), "cpu")
    plan = attention.plan(**STEP)
    given = {**RUN, "v_cache": CACHE + 1, "sinks": torch.rand(4), "k_scale": torch.rand(2)}
    expected = attention.run(plan, **given)
    given[name], apart, across = beside(given[name])
    assert torch.equal(attention.run(plan, **given, out=apart), expected)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"out lies in the memory of {name}: expected memory of its own"):
        attention.run(plan, **given, out=across)
    assert torch.equal(attention.run(plan, **given, out=apart), expected)  # type: ignore[arg-type]


def test_an_out_whose_place_takes_too_long_to_find_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strides that have nothing in common make the question hard. Here one try is allowed, and no element is shared."""
    attention, buffer = BatchAttention(GOOD, "cpu"), torch.zeros(8192)
    out, cache = buffer.as_strided(Q.shape, (2096, 518, 30)), buffer.as_strided(CACHE.shape, (274, 61, 28, 1), 38)
    monkeypatch.setattr(validate, "_MOST_WORK", 1)
    with pytest.raises(ValueError, match="out lies in the memory of k_cache: expected memory of its own"):
        attention.run(attention.plan(**STEP), **RUN | {"k_cache": cache}, out=out)


def test_an_out_in_a_latent_cache_is_refused() -> None:
    config = AttentionConfig(1, 1, 24, 4, torch.float32, latent_dim=16, sm_scale=0.2)
    attention, cache = BatchAttention(config, "cpu"), torch.zeros(NUM_PAGES, 4, 24)
    q, out = torch.zeros(3, 1, 24), cache.view(-1, 1, 24)[:3, :, 8:]
    with pytest.raises(ValueError, match="out lies in the memory of k_cache"):
        attention.run(attention.plan(**STEP), q, cache, out=out)


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "out", "v_scale"])
def test_tangents_of_forward_mode_are_refused(name: str) -> None:
    """They would be lost: the output has none. Under no_grad, too, where torch has them."""
    attention = BatchAttention(GOOD, "cpu")
    plan = attention.plan(**STEP)
    given = {**RUN, "out": torch.empty_like(Q), "v_scale": torch.ones(2)}
    with torch.no_grad(), forward_ad.dual_level():
        expected = attention.run(plan, **given).clone()  # type: ignore[union-attr]
        dual = forward_ad.make_dual(given[name].clone(), torch.ones_like(given[name]))
        with pytest.raises(ValueError, match=f"{name} is a dual tensor of forward-mode differentiation: expected no"):
            attention.run(plan, **(given | {name: dual}))
        assert torch.equal(attention.run(plan, **given), expected)  # type: ignore[arg-type]


def one_of_a_batch(function: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    return lambda tensor: torch.func.vmap(function)(tensor[None])


@pytest.mark.parametrize("transformed", [torch.func.functionalize, one_of_a_batch])
def test_tensors_without_memory_are_named(transformed: Callable[..., Any]) -> None:
    """Kernels read memory, which wrappers of torch.func have none of: reading at 0 would end the process."""
    attention = BatchAttention(GOOD, "cpu")
    plan = attention.plan(**STEP)
    for name in ("q", "k_cache", "v_cache"):
        with pytest.raises(ValueError, match=rf"{name} is a Tensor without memory of its own: expected a plain tensor"):
            transformed(lambda given, name=name: attention.run(plan, **{**RUN, name: given}))(RUN[name])
    with pytest.raises(ValueError, match="block_table is a Tensor without memory of its own"):
        transformed(lambda given: attention.plan(**{**STEP, "block_table": given}))(STEP["block_table"])


def test_a_cache_whose_pages_a_gpu_does_not_count_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caches are said to lie on a GPU and have no memory: nothing is launched."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(layer_inputs, "check_memory", lambda *_: None)
    with FakeTensorMode():
        q = torch.empty(3, 4, 16, device="cuda")
        caches = {
            name: torch.empty_strided((8, 4, 2, 16), (32, stride, 16, 1), device="cuda")
            for name, stride in (("k_cache", 2**29), ("v_cache", 2**29 + 16))
        }
        with pytest.raises(ValueError, match=r"v_cache has strides .*: expected tokens of a page within 2147483648 el"):
            layer_inputs.check_layer(GOOD, q.device, 3, layer_inputs.LayerInputs(q, **caches))


def test_checks_that_python_leaves_out_say_so() -> None:
    code = (
        "import torch; from trunkattn import AttentionConfig, BatchAttention; "
        "attention = BatchAttention(AttentionConfig(4, 2, 16, 4, torch.float32), 'cpu'); "
        "attention.plan(torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)).check()"
    )
    found = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, check=False)
    assert found.returncode == 1 and "RuntimeError: Plan.check consists of assertions" in found.stderr
