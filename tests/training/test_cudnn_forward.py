"""The forward pass by PyTorch's cuDNN ahead of a backward pass of our own: who takes it, and what it returns, held to
another back end on a CPU; on a card: `tests/on_gpu/test_training_libraries.py`."""

from typing import Any

import pytest
import torch

from trunkattn.gpu.cards import ASSUMED, Card
from trunkattn.gpu.kernel import Work, choose
from trunkattn.training import cudnn_forward, op, torch_cudnn
from trunkattn.training.hopper import forward as hopper
from trunkattn.training.sequences import Sequences
from trunkattn.training.spec import UNEVEN, TrainingConfig, refuses_cudnn_forward

NAME = "cuDNN forward"
BF16 = torch.bfloat16
NARROW = TrainingConfig(64, BF16, 64)


def chosen(config: TrainingConfig, work: Work = Work.FORWARD, capability: int = 90) -> str | None:
    card = Card(ASSUMED.facts._replace(capability=capability), ASSUMED.model)
    kernel = choose(work, config, card).kernel
    return kernel.name if kernel else None


@pytest.mark.parametrize("options", [(), ("cu_seqlens_q",), ("tree",), (UNEVEN,), ("deterministic",), ("sinks",)])
@pytest.mark.parametrize("is_grouped", [False, True])
@pytest.mark.parametrize("is_long", [False, True])
@pytest.mark.parametrize("head_dim", [40, 64, 72, 96, 104, 128])
def test_it_is_taken_where_our_backward_pass_is_faster(
    head_dim: int, is_long: bool, is_grouped: bool, options: tuple[str, ...]
) -> None:
    """Unless our forward pass is faster, too, which it is in long sequences with heads of 72 to 96."""
    config = TrainingConfig(head_dim, BF16, head_dim, options, is_grouped, is_long)
    is_faster = is_grouped or head_dim <= 96
    has_forward = is_long and 72 <= head_dim <= 96
    assert chosen(config) == (NAME if not options and is_faster and not has_forward else "Hopper forward")
    assert chosen(config, Work.BACKWARD) == "Hopper backward"
    assert chosen(config, Work.BATCH) == ("cuDNN of PyTorch" if not options and not is_faster else None)


@pytest.mark.parametrize("is_grouped", [False, True])
def test_what_it_says_of_hopper_kernels_is_said_where_they_compute(is_grouped: bool) -> None:
    def why(head_dim: int, capability: int = 90, **changes: Any) -> str:
        card = Card(ASSUMED.facts._replace(capability=capability), ASSUMED.model)
        config = TrainingConfig(head_dim, BF16, head_dim, is_grouped=is_grouped)._replace(**changes)
        return "; ".join(refuses_cudnn_forward(config, card))

    faster = "2048 queries or more: the Hopper forward pass is faster"
    assert why(80, is_long=True).endswith(faster)
    assert why(256) == "head_dim 256, of values 256: expected multiples of 8 to 128"
    assert "faster" not in why(80, 80, is_long=True) and "as fast" not in why(128, 80)


def test_the_wider_of_keys_and_values_decides() -> None:
    for changes in ({"head_dim": 128}, {"head_dim_v": 128}):
        assert chosen(NARROW._replace(**changes)) == "Hopper forward"
        assert chosen(NARROW._replace(**changes), Work.BATCH) == "cuDNN of PyTorch"


@pytest.mark.parametrize("changes", [{"head_dim": 32, "head_dim_v": 32}, {"dtype": torch.float32}])
def test_without_a_backward_pass_for_hopper_it_is_not(changes: dict[str, Any]) -> None:
    assert chosen(NARROW._replace(**changes)) == "portable forward"


def test_on_blackwell_cudnn_computes_both_passes() -> None:
    assert chosen(NARROW, capability=100) == "portable forward"
    assert chosen(NARROW, Work.BATCH, capability=100) == "cuDNN of PyTorch"


def test_a_torch_that_cannot_leaves_it_to_the_next_kernel_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after `torch.backends.cuda.enable_cudnn_sdp(False)`. Where there is no card, an H100 stands in."""
    q, k = torch.zeros(2, 300, 8, 64, dtype=BF16), torch.zeros(2, 300, 2, 64, dtype=BF16)
    odd, empty = torch.zeros(k.numel() + 1, dtype=BF16)[1:].view(k.shape), k[:, :0]
    portable = op.portable_kernel(Work.FORWARD).source()
    assert op._kernel(Work.FORWARD, (q, k, k), ()) is op._kernel(Work.FORWARD, (q, k, odd), ()) is hopper
    assert op._kernel(Work.FORWARD, (q, empty, empty), ()) is portable
    monkeypatch.setattr(torch_cudnn, "reads", lambda q, k, v, causal: causal)
    assert op._kernel(Work.FORWARD, (q, k, k), ()) is cudnn_forward
    assert op._kernel(Work.FORWARD, (q, k, k), ("cu_seqlens_q",)) is hopper
    assert op._kernel(Work.FORWARD, (q, k[:, :200], k[:, :200]), ()) is hopper


@pytest.mark.parametrize(
    ("sequences", "names"),
    [
        (Sequences(True, 0.1), (UNEVEN,)),
        (Sequences(False, 0.1), ()),
        (Sequences(True, 0.1, torch.zeros(2), torch.zeros(2)), ("cu_seqlens_q",)),
    ],
)
def test_what_tells_sequences_from_a_batch_of_one_length(sequences: Sequences, names: tuple[str, ...]) -> None:
    q, k = torch.zeros(2, 3, 4, 8), torch.zeros(2, 5, 4, 8)
    assert sequences.layout(q, k) == names
    assert sequences.layout(q, q) == tuple(name for name in names if name != UNEVEN)


@pytest.mark.parametrize(("causal", "seqlen_k"), [(True, 9), (False, 17)])
def test_outputs_and_sums(causal: bool, seqlen_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def elsewhere(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keeps_lse: bool, causal: bool, sm_scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As cuDNN's: heads first, and one more dim of the sums."""
        assert keeps_lse
        tensors = (tensor.transpose(1, 2).contiguous() for tensor in (q, k, v))
        out, lse = op.attention(*tensors, *op.arguments_of(Sequences(causal, sm_scale)))
        return out.transpose(1, 2), lse[..., None]

    monkeypatch.setattr(torch_cudnn, "compute", elsewhere)
    torch.manual_seed(0)
    q, k = torch.randn(3, 9, 4, 8), torch.randn(3, seqlen_k, 2, 8)
    out, lse = cudnn_forward.forward(q, k, k, Sequences(causal, 0.3))
    expected = op.attention(q, k, k, *op.arguments_of(Sequences(causal, 0.3)))
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


def test_torch_returns_what_the_backward_pass_reads() -> None:
    """The op is no public interface: tensors without data hold it to what is returned."""
    q, k = (torch.empty(2, 16, heads, 64, device="meta", dtype=BF16) for heads in (8, 2))
    out, lse = cudnn_forward.forward(q, k, k, Sequences(True, 0.3))
    assert out.shape == q.shape and out.dtype == BF16 and out.is_contiguous()
    assert lse.shape == (2, 8, 16) and lse.dtype == torch.float32
