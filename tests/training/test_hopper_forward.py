"""Which attention the Hopper forward pass gets, its arguments, and what it compiles to; on a card:
tests/on_gpu/test_flash_attention.py."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.kernels.tile_solver import ARCHITECTURES
from trunkattn import PrefixTree
from trunkattn.gpu.cards import ASSUMED, Card
from trunkattn.gpu.hopper.pipeline import BAR_K_EMPTY
from trunkattn.gpu.kernel import Work, choose
from trunkattn.planner.work_list import UNLIMITED
from trunkattn.training import op
from trunkattn.training.arguments import Variant
from trunkattn.training.hopper import forward as hopper
from trunkattn.training.hopper.common import readable_by_tma
from trunkattn.training.hopper.forward_arguments import ForwardArguments, forward_constants
from trunkattn.training.hopper.producer import BAR_Q_EMPTY
from trunkattn.training.hopper.query_gradients import query_constants
from trunkattn.training.sequences import OPTIONS, Sequences
from trunkattn.training.spec import UNEVEN, TrainingConfig, hopper_forward_tile

from ..compiling import compile_report

pytestmark = pytest.mark.slow

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
COMPILE = str(Path(__file__).with_name("hopper_report.py"))
FEW = ("64/64 tree", "dq 192/128 causal")  # all others are left to `make test-compile`
SPILLED_AT_MOST = 400  # bytes of a thread's stack with Triton 3.9, outside of the loop over blocks without a mask
DQ_SPILLED_AT_MOST = 600  # of the kernel of dq, as above
# The same with a soft cap over packed sequences and over a tree, as found: the lab note of 2026-12-01 says that none of
# these was timed.
DQ_CAP_SPILLED_AT_MOST = {
    "64/64": (72, 464), "96/96": (48, 40), "128/128": (48, 48), "192/128": (232, 368), "192/192": (264, 400),
    "256/256": (184, 232), "128/256": (56, 112), "256/128": (88, 128),
}  # fmt: skip
NAME = "Hopper forward"
PLAIN = TrainingConfig(128, BF16, 128, ("cu_seqlens_q",))  # which no other fast kernel computes


@pytest.mark.parametrize("names", [FEW, pytest.param((), marks=pytest.mark.compile)])
def test_it_compiles_and_fits_the_card(names: tuple[str, ...]) -> None:
    for name, used in compile_report(COMPILE, *names).items():
        assert used["shared"] <= ARCHITECTURES[90].shared_per_cta, name
        assert used["spilled"] <= spilled_at_most(name), name
        assert not used["serialized"], f"{name}: a product waits for the one before"
        assert 0 < used["barriers"] <= BAR_K_EMPTY.value < BAR_Q_EMPTY.value, name
        fills, acquires, products, releases = used["pipelines"]
        clears = "packed" in name or name.endswith("options")
        assert acquires == fills + 1 + 2 * clears, f"{name}: something is filled that its consumers have not released"
        blocks = (releases - 2) // 2  # places in the code of both warpgroups that compute one
        assert products == blocks * parts_of(name), f"{name}: a product, or a warpgroup's queries, are not released"


def spilled_at_most(name: str) -> int:
    if not name.startswith("dq "):
        return SPILLED_AT_MOST
    _, head_dims, kind = name.split(" ", 2)
    return DQ_CAP_SPILLED_AT_MOST[head_dims][kind.endswith("tree")] if "options" in kind else DQ_SPILLED_AT_MOST


def parts_of(name: str) -> int:
    """Products of a block, with its keys and with its values; for dq with its keys twice."""
    keys, head_values = map(int, name.removeprefix("dq ").split()[0].split("/"))
    head_dims, variant = (keys, head_values), Variant(True, False, False, *(False,) * 5)
    if name.startswith("dq "):
        of_queries = query_constants(head_dims, variant, 0.0)
        shapes = of_queries.mainloop, of_queries.value_shape
        return sum(len(shape.key_parts) for shape in shapes) + len(of_queries.mainloop.value_parts)
    mainloop = forward_constants(head_dims, hopper_forward_tile(head_dims), variant).mainloop
    return len(mainloop.key_parts) + len(mainloop.value_parts)


@pytest.mark.compile
def test_it_compiles_with_the_oldest_triton() -> None:
    for name, used in compile_report(COMPILE, "128/128 packed", "dq 128/128 packed", oldest=True).items():
        assert used["spilled"] <= 64 and not used["serialized"], name


def test_registers_suffice_for_its_warps() -> None:
    """Two groups of 4 warps that compute; one producer is given out as the 4 warps that it starts."""
    consumers, producer = hopper._CONSUMER_REGISTERS.value, hopper._PRODUCER_REGISTERS.value
    assert (2 * consumers + producer) * 128 <= hopper.LAUNCH_REGISTERS * 384 <= ARCHITECTURES[90].registers


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"dtype": F16, "head_dim": 64, "head_dim_v": 64}, None),
        ({"head_dim": 192}, None),
        ({"head_dim": 256, "head_dim_v": 256}, None),
        ({"dtype": F32}, "dtype torch.float32: expected torch.bfloat16 or torch.float16"),
        ({"head_dim": 76}, "head_dim 76: expected a multiple of 8 from 40 to 256"),
        ({"head_dim_v": 32}, "head_dim_v 32: expected a multiple of 8 from 40 to 256"),
        ({"options": OPTIONS}, None),
    ],
)
def test_what_it_refuses_goes_to_the_portable_kernel(changes: dict[str, Any], reason: str | None) -> None:
    choice = choose(Work.FORWARD, PLAIN._replace(**changes), ASSUMED)
    assert choice.kernel is not None
    assert choice.kernel.name == ("portable forward" if reason else NAME)
    assert choice.passed_over.get(NAME) == ((reason,) if reason else None)
    assert choice.kernel.tiles(PLAIN._replace(**changes), ASSUMED)


def test_other_cards_have_the_portable_kernel() -> None:
    blackwell = Card(ASSUMED.facts._replace(capability=100), ASSUMED.model)
    choice = choose(Work.FORWARD, PLAIN, blackwell)
    assert choice.kernel and choice.kernel.portable
    assert choice.passed_over[NAME] == ("compute capability 10.0: the fast kernels are for 9.0",)


def tensors(dtype: torch.dtype = BF16) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k = torch.zeros(2, 300, 8, 128, dtype=dtype), torch.zeros(2, 400, 2, 128, dtype=dtype)
    return q, k, torch.zeros_like(k)


def test_empty_tensors_go_to_the_portable_kernel_and_no_others() -> None:
    """Where there is no card, an H100 stands in."""
    q, k, v = tensors()
    portable = op.portable_kernel(Work.FORWARD).source()
    plain = Sequences(True, 0.1)
    assert plain.layout(q, k) == (UNEVEN,)
    assert op._kernel(Work.FORWARD, (q, k, v), plain.options) is hopper  # cuDNN's forward pass does not read them here
    for option in ({"sliding_window": 7}, {"soft_cap": 3.0}, {"sinks": torch.zeros(8)}):
        assert op._kernel(Work.FORWARD, (q, k, v), replace(plain, **option).options) is hopper
    odd = torch.zeros(v.numel() + 1, dtype=BF16)[1:].view(v.shape)
    for options in ((), ("tree",)):
        assert op._kernel(Work.FORWARD, (q, k, odd), options) is hopper
        assert op._kernel(Work.FORWARD, (q, k[:, :0], v[:, :0]), options) is portable


def test_what_tma_reads() -> None:
    wide = torch.zeros(3, 50, 4, 72, dtype=F16)
    as_they_are = (
        wide, wide[..., :64], wide.transpose(1, 2), wide[:1], wide[1, :, :1],
        torch.zeros(10, 3, 4, 64, dtype=F16)[:, 1],
    )  # fmt: skip
    assert all(one is other for one, other in zip(readable_by_tma(*as_they_are), as_they_are, strict=True))
    copied = (
        wide[..., 1:65], wide[:, :1].expand(-1, 50, -1, -1), torch.zeros(2, 9, 64, 4, dtype=F16).transpose(2, 3),
        torch.rand(3 * 50 * 4 * 64 + 1).to(F16)[1:].view(3, 50, 4, 64), torch.rand(3, 50, 4, 76).to(F16)[..., :72],
    )  # fmt: skip
    for tensor, copy in zip(copied, readable_by_tma(*copied), strict=True):
        assert copy.is_contiguous() and copy.data_ptr() % 16 == 0 and torch.equal(copy, tensor)


class Recorder:
    """Stands in for the kernel."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda **given: self.calls.append((grid[0], given))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(hopper, "hopper_forward_kernel", recorder)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    return recorder


def test_the_arguments_are_the_parameters_of_the_kernel() -> None:
    assert list(ForwardArguments._fields) == hopper.hopper_forward_kernel.arg_names


def test_it_is_launched_for_a_batch(kernel: Recorder) -> None:
    q, k, v = tensors()
    out, lse = hopper.forward(q, k, v, Sequences(True, 0.1))
    ((num_ctas, given),) = kernel.calls
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, (2, 8, 300), F32)
    assert num_ctas == 3 * 8 * 2
    assert given["k_desc"].shape == list(k.shape) and given["k_desc"].block_shape == [1, 128, 1, 128]
    assert given["section"] == 16 and given["tables"].next_tile.tolist() == [0]
    constants = given["C"]
    assert (constants.variant.causal, constants.variant.packed, constants.variant.tree) == (True, False, False)
    assert (given["num_warps"], given["maxnreg"]) == (4, hopper.LAUNCH_REGISTERS)


def test_it_is_launched_for_packed_sequences_of_a_fused_tensor(kernel: Recorder) -> None:
    q, k, v = torch.zeros(1000, 3, 4, 96, dtype=F16).unbind(1)
    sums = torch.tensor([0, 7, 900], dtype=torch.int32)
    out, lse = hopper.forward(q, k, v, Sequences(False, 0.1, sums, sums))
    ((num_ctas, given),) = kernel.calls
    assert (out.shape, lse.shape, out.is_contiguous()) == ((1000, 4, 96), (4, 1000), True)
    assert num_ctas == (1000 // 128 + 2 + 1) * 4  # at most one more for each sequence, and for what is behind them
    assert given["num_sequences"] == 2 and given["section"] == 1
    assert given["v_desc"].strides[1:] == [3 * 4 * 96, 96, 1]
    assert given["C"].variant.packed and given["C"].mainloop.head_dim == 128 and given["C"].value_dim == 96


def test_it_is_launched_for_a_tree(kernel: Recorder) -> None:
    tree = PrefixTree.from_segments([-1, 0, 0], [60, 40, 40]).tables(torch.device("cpu"))
    q, k = torch.zeros(140, 4, 192, dtype=BF16), torch.zeros(140, 2, 192, dtype=BF16)
    out, _ = hopper.forward(q, k, k[..., :128], Sequences(False, 0.1, tree=tree))
    ((_, given),) = kernel.calls
    assert out.shape == (140, 4, 128)
    assert given["tables"].segments is tree.segments
    constants = given["C"]
    assert constants.variant.tree and constants.variant.causal and not constants.own_out
    assert (constants.mainloop.head_dim, constants.value_shape.head_dim) == (192, 128)
    assert given["q_desc"].block_shape == [1, 64, 1, 64] and given["out_desc"].block_shape == [1, 64, 1, 128]
    assert given["tables"].window == UNLIMITED and given["tables"].depths is None


def test_it_is_launched_with_a_window_a_cap_and_sinks(kernel: Recorder) -> None:
    q, k, v = tensors()
    sinks = torch.zeros(8)
    for window, of_sequence in ((7, 7), (UNLIMITED, 704)):
        hopper.forward(q, k, v, Sequences(False, 0.1, sliding_window=window, soft_cap=3.0, sinks=sinks))
        _, given = kernel.calls.pop()
        assert given["tables"].window == of_sequence, "sums of a larger one would not fit 32 bits"
        assert given["tables"].sinks is sinks and given["tables"].depths is None
        assert given["C"].soft_cap == 3.0 and given["scale"] == 0.1, "capped logits are in base e"
        assert (given["C"].variant.window, given["C"].variant.soft_cap, given["C"].variant.sinks) == (True,) * 3


def test_a_tree_with_a_window_has_depths(kernel: Recorder) -> None:
    tree = PrefixTree.from_segments([-1, 0, 0], [60, 40, 40]).tables(torch.device("cpu"))
    q = torch.zeros(140, 4, 64, dtype=BF16)
    hopper.forward(q, q, q, Sequences(False, 0.1, tree=tree, sliding_window=30))
    ((_, given),) = kernel.calls
    assert given["tables"].depths is tree.depths and given["tables"].window == 30


def test_equal_constants_are_one_object(kernel: Recorder) -> None:
    """Triton compares them at each launch."""
    q, k, v = tensors()
    for _ in range(2):
        hopper.forward(q, k, v, Sequences(True, 0.1))
    first, second = (given["C"] for _, given in kernel.calls)
    assert first is second
    assert hash(first) == hash(first._replace())


@pytest.mark.parametrize(
    ("head_dim", "parts"),
    [
        (128, (128,)),
        (96, (64, 32)),
        (72, (64, 16)),
        (40, (32, 16)),
        (192, (128, 64)),
        (136, (128, 16)),
        (176, (128, 32, 16)),
        (248, (256,)),
    ],
)
def test_padding_of_keys_is_not_multiplied(head_dim: int, parts: tuple[int, ...]) -> None:
    variant = Variant(True, False, False, *(False,) * 5)
    head_dims = head_dim, head_dim
    mainloop = forward_constants(head_dims, hopper_forward_tile(head_dims), variant).mainloop
    found = mainloop.key_parts
    begins = [mainloop.parts[part.memory].begin + part.begin for part in found]
    assert begins == [sum(part.width for part in found[:i]) for i in range(len(found))]
    assert tuple(part.width for part in found) == parts
    assert all(part.begin + part.width <= mainloop.parts[part.memory].width for part in found)


@pytest.mark.parametrize(
    "head_dims",
    [
        (64, 64),
        (128, 128),
        (96, 40),
        (192, 128),
        (128, 192),
        (192, 192),
        (256, 256),
        (64, 256),
        (192, 256),
        (256, 192),
    ],
)
def test_every_head_dim_fits_shared_memory(head_dims: tuple[int, int]) -> None:
    tile = hopper_forward_tile(head_dims)
    constants = forward_constants(head_dims, tile, Variant(True, False, False, *(False,) * 5))
    keys, head_values = constants.mainloop.head_dim, constants.value_shape.head_dim
    rows = tile.block_m * (keys + head_values * constants.own_out) + tile.stages * tile.block_n * (keys + head_values)
    assert 2 * rows + 1024 <= ARCHITECTURES[90].shared_per_cta
    memory, outputs = (shape.parts for shape in (constants.mainloop, constants.value_shape))
    assert constants.own_out or memory[: len(outputs)] == outputs, "outputs take the place of the queries"
