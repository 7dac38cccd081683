"""Two ranks that share each request, as two threads with the plans and kernels of the CPU: together they give what one
rank gives. vLLM's merge is a Triton kernel; here it is the formula."""

import itertools
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.distributed import parallel_state
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens

from trunkattn import merge_states
from trunkattn.integrations.vllm import cuda_impl, versions
from trunkattn.integrations.vllm.context_parallel import ContextRanks
from trunkattn.integrations.vllm.flash import FlashPrefill
from trunkattn.reference import paged_attention

from .fakes import DIM, HEADS, ONE, PAGE, SCALE, make_batch, make_builder, make_layer

RANKS = 2
KV_HEADS = 1  # vLLM asks for more ranks than KV heads
pytestmark = pytest.mark.usefixtures("gpu_engine")


class Meeting:
    """Where ranks exchange tensors."""

    def __init__(self) -> None:
        self.barrier, self.brought = threading.Barrier(RANKS, timeout=300), [None] * RANKS

    def exchange(self, rank: int, tensor: torch.Tensor) -> list[Any]:
        self.brought[rank] = tensor
        self.barrier.wait()
        found = list(self.brought)
        self.barrier.wait()
        return found


class Rank:
    """What of vLLM's group of ranks is used."""

    world_size = RANKS

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank_in_group, self._meeting = rank, meeting

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat(self._meeting.exchange(self.rank_in_group, tensor), dim)

    def combine(self, out: torch.Tensor, lse: torch.Tensor, group: Any, return_lse: bool) -> tuple[torch.Tensor, ...]:
        assert group is self
        assert return_lse
        outs, lses = (self._meeting.exchange(self.rank_in_group, each.clone()) for each in (out, lse))
        merged, merged_lse = merge_states(outs[0], lses[0], outs[1], lses[1])
        heads = slice(self.rank_in_group * HEADS, (self.rank_in_group + 1) * HEADS)
        return merged[:, heads].contiguous(), merged_lse[:, heads].contiguous()


class FlashOfRanks:
    """flash_attn_varlen_func with log-sum-exps, over a cache or over keys at hand, causal or not."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(self, **given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.append(given)
        starts = given["cu_seqlens_q"].tolist()
        lse = torch.full((given["q"].shape[1], len(given["q"])), -float("inf"))
        for row, (begin, end) in enumerate(itertools.pairwise(starts)):
            keys, values = (self._of_row(given, name, row, begin, end) for name in ("k", "v"))
            if not len(keys):
                given["out"][begin:end] = float("nan")
                continue
            group = given["q"].shape[1] // keys.shape[1]
            logits = torch.einsum("qhd,khd->hqk", given["q"][begin:end].double(), keys.repeat_interleave(group, 1))
            logits *= given["softmax_scale"]
            if given["causal"]:
                logits += torch.full(logits.shape[1:], -torch.inf).triu(1 + len(keys) - (end - begin))
            lse[:, begin:end] = logits.logsumexp(-1)
            weighted = torch.einsum("hqk,khd->qhd", logits.softmax(-1), values.repeat_interleave(group, 1))
            given["out"][begin:end] = weighted.to(given["out"].dtype)
        return given["out"], lse

    @staticmethod
    def _of_row(given: dict[str, Any], name: str, row: int, begin: int, end: int) -> torch.Tensor:
        if "block_table" not in given:
            return given[name][begin:end].double()
        length = int(given["seqused_k"][row])
        blocks = given["block_table"][row, : -(-length // PAGE)].long()
        return given[name][blocks].flatten(0, 1)[:length].double()


def merge_into(output: torch.Tensor, prefix: torch.Tensor, prefix_lse: Any, suffix: Any, suffix_lse: Any) -> None:
    merged, _ = merge_states(prefix, prefix_lse.transpose(0, 1), suffix, suffix_lse.transpose(0, 1))
    output.copy_(merged)


@pytest.fixture
def make_ranks(gpu_engine: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """The builders of both ranks, each with one layer."""

    def make(interleave: int = 1, **changes: Any) -> list[Any]:
        parallel, meeting, found = gpu_engine.parallel_config, Meeting(), []
        parallel.decode_context_parallel_size, parallel.cp_kv_cache_interleave_size = RANKS, interleave
        for number in range(RANKS):
            rank, flash = Rank(number, meeting), FlashOfRanks()
            monkeypatch.setattr(parallel_state, "_DCP", rank)
            monkeypatch.setattr(versions, "context_combine", lambda config, rank=rank: rank.combine)
            monkeypatch.setattr(
                cuda_impl, "find_flash", lambda spec, flash=flash: (FlashPrefill(spec, 3, flash), "FlashAttention 3")
            )
            gpu_engine.compilation_config.static_forward_context.clear()
            found.append(make_builder(gpu_engine, make_layer(torch.float32, kv_heads=KV_HEADS, **changes)))
        return found

    monkeypatch.setattr(versions, "merge_attention_states", lambda: merge_into)
    return make


def run_ranks(builders: list[Any], batch: Any, interleave: int) -> tuple[list[Any], float]:
    """(steps of the ranks, the error of their outputs against one cache that holds all)."""
    torch.manual_seed(0)
    total, live = batch.num_actual_tokens, int(batch.query_start_loc[-1])
    lens, starts = batch.seq_lens.tolist(), batch.query_start_loc.tolist()
    longest, rows = max(lens), len(lens)
    keys, values = torch.randn(2, rows, longest, KV_HEADS, DIM)
    common = RANKS * PAGE  # the tokens of the block that all rows share
    keys[:, :common], values[:, :common] = keys[0, :common].clone(), values[0, :common].clone()
    query = torch.randn(total, RANKS * HEADS, DIM)
    new_keys, new_values = torch.zeros(2, total, KV_HEADS, DIM)
    for row, length in enumerate(lens):
        tokens = slice(starts[row], starts[row + 1])
        first = length - (starts[row + 1] - starts[row])
        new_keys[tokens], new_values[tokens] = keys[row, first:length], values[row, first:length]
    for number, builder in enumerate(builders):
        (module,) = builder.modules.values()
        caches = versions.split_cache(module.kv_cache, DIM, torch.float32)
        for cache, whole in zip(caches, (keys, values), strict=True):
            for row, length in enumerate(lens):
                mine = [t for t in range(length) if t // interleave % RANKS == number]
                for at, token in enumerate(mine):
                    cache[batch.block_table_tensor[row, at // PAGE], at % PAGE] = whole[row, token]
    outs: list[Any] = [None] * RANKS
    steps: list[Any] = [None] * RANKS
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            builder = builders[number]
            (module,) = builder.modules.values()
            own = query[:, number * HEADS : (number + 1) * HEADS].clone()
            steps[number], outs[number] = builder.build(0, batch), torch.empty_like(own)
            module.impl.forward(ONE, own, new_keys, new_values, module.kv_cache, steps[number], outs[number])
        except BaseException as error:
            failures.append(error)
            builders[0].modules[next(iter(builders[0].modules))].impl.group.group._meeting.barrier.abort()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    columns = -(-longest // PAGE)
    padded = torch.zeros(2, rows, columns * PAGE, KV_HEADS, DIM)
    padded[0, :, :longest], padded[1, :, :longest] = keys, values
    table = torch.arange(rows * columns, dtype=torch.int32).view(rows, columns)
    k_cache, v_cache = padded.view(2, -1, PAGE, KV_HEADS, DIM)
    error = 0.0
    for number in range(RANKS):
        mine = query[:live, number * HEADS : (number + 1) * HEADS]
        expected, _ = paged_attention(
            mine, k_cache, v_cache, table, batch.seq_lens, batch.query_start_loc, sm_scale=SCALE
        )
        error = max(error, float((outs[number][:live].double() - expected).abs().max()))
    return steps, error


@pytest.mark.parametrize("interleave", [1, 4, PAGE])
def test_decoding(make_ranks: Callable[..., list[Any]], interleave: int) -> None:
    """One row is so short that a rank holds nothing of it, and reads a place that nobody wrote."""
    builders = make_ranks(interleave)
    batch = make_batch([1, 1, 1, 1], [0, 40, 60, 75], padding=1)
    steps, error = run_ranks(builders, batch, interleave)
    assert error < 1e-5
    for number, step in enumerate(steps):
        assert (step.decodes, step.decode_tokens, step.prefill) == (5, 5, None)
        assert step.nothing_local[:4, 0].tolist() == [number > 0, False, False, False]
        assert step.nothing_local.data_ptr() == builders[number].build(0, batch).nothing_local.data_ptr()


def test_decoding_without_a_mask_would_be_wrong(
    make_ranks: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the short row."""
    builders = make_ranks()
    monkeypatch.setattr(torch.Tensor, "masked_fill_", lambda self, *arguments: self)
    _, error = run_ranks(builders, make_batch([1, 1], [0, 40]), 1)
    assert error > 0.01


@pytest.mark.parametrize("interleave", [1, PAGE])
def test_decoding_and_prompts_in_one_step(make_ranks: Callable[..., list[Any]], interleave: int) -> None:
    builders = make_ranks(interleave)
    batch = make_batch([1, 1, 5, 30], [20, 40, 60, 0])
    steps, error = run_ranks(builders, batch, interleave)
    assert error < 1e-5
    for number, (builder, step) in enumerate(zip(builders, steps, strict=True)):
        assert (step.decodes, step.decode_tokens, step.prefill.tokens) == (2, 2, slice(2, 37))
        context = get_dcp_local_seq_lens(torch.tensor([60, 0]), RANKS, number, interleave)
        assert torch.equal(step.prefill.context_lens, context)
        (module,) = builder.modules.values()
        own, of_cache = module.impl.flash.varlen.calls
        assert (own["causal"], of_cache["causal"]) == (True, False)
        assert of_cache["max_seqlen_k"] >= int(context.max())
        assert of_cache["q"].shape[1] == RANKS * HEADS


def test_prompts_from_their_beginning_need_no_cache(make_ranks: Callable[..., list[Any]]) -> None:
    """As far as the host knows; then no rank gathers."""
    builders, batch = make_ranks(), make_batch([7, 30], [0, 0])
    batch.seq_lens_cpu_upper_bound = batch.seq_lens.clone()
    steps, error = run_ranks(builders, batch, 1)
    assert error < 1e-5
    assert [step.prefill.context_lens for step in steps] == [None, None]
    for builder in builders:
        (module,) = builder.modules.values()
        assert len(module.impl.flash.varlen.calls) == 1


def test_lengths_are_those_of_vllm() -> None:
    lens = torch.arange(200, dtype=torch.int32)
    for size, interleave in ((2, 1), (2, 16), (4, 3)):
        for rank in range(size):
            expected = get_dcp_local_seq_lens(lens, size, rank, interleave)
            assert torch.equal(ContextRanks(size, rank, interleave).local_lens(lens), expected)


def test_what_vllm_asks(make_ranks: Callable[..., list[Any]], gpu_engine: VllmConfig) -> None:
    (builder, _) = make_ranks()
    (module,) = builder.modules.values()
    assert module.impl.supports_dcp
    assert module.impl.need_to_return_lse_for_decode
    assert module.impl.layer_spec.num_qo_heads == RANKS * HEADS
    gpu_engine.speculative_config = SimpleNamespace(num_speculative_tokens=3, parallel_drafting=False)  # type: ignore[assignment]
    (builder, _) = make_ranks()
    assert builder.reorder_batch_threshold == 1, "rows that verify drafts are prompts"
    assert not builder.supports_draft_decode_metadata_update
    spec = builder.kv_cache_spec
    assert builder.get_cudagraph_support(gpu_engine, spec) is AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    assert builder.get_varlen_cudagraph_max_query_len(gpu_engine, spec) == 1


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"window": 16}, "sliding windows"),
        ({"extra": {"sinks": torch.zeros(HEADS)}}, "sinks, which each rank"),
        ({"shared": "model.layers.0.attn"}, "layers that read the KV cache of another"),
    ],
)
def test_layers_that_ranks_cannot_share(
    make_ranks: Callable[..., list[Any]], changes: dict[str, Any], word: str
) -> None:
    with pytest.raises(ValueError, match=f"decode context parallelism with {word}"):
        make_ranks(**changes)


def test_prompts_that_flash_attention_cannot_compute(gpu_engine: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_engine.parallel_config.decode_context_parallel_size = RANKS
    monkeypatch.setattr(parallel_state, "_DCP", Rank(0, Meeting()))
    with pytest.raises(ValueError, match="whose prompts FlashAttention does not run"):
        make_layer(cache="fp8")
    for version in (None, 2):
        found = FlashPrefill(None, 2, None) if version else None
        monkeypatch.setattr(cuda_impl, "find_flash", lambda spec, found=found: (found, "no FlashAttention"))
        with pytest.raises(ValueError, match="FlashAttention 2" if version else "no FlashAttention"):
            make_layer()
