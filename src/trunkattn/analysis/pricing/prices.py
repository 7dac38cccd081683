"""What a step costs on a card: attention one by one and shared, weights, and the rest, without a GPU.

Shared attention is what the planner predicts for the tiling that it would choose. Attention one by one is
FlashAttention's, which reads a shared page once from memory and again from the L2 cache: two rates fitted to measured
times describe it better than our own kernels without sharing do.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from trunkattn.analysis.pricing.memory import NUMBER_BYTES, check_cards, layer_token_bytes
from trunkattn.analysis.pricing.model_shape import ModelShape
from trunkattn.analysis.settings import KV_CACHE_DTYPES
from trunkattn.config import AttentionConfig
from trunkattn.gpu.cards import Card, EngineTimes
from trunkattn.gpu.kernel import Kernel, kernels_of
from trunkattn.gpu.step_planners import make_rule
from trunkattn.gpu.tiles import gpu_device
from trunkattn.planner.from_config import make_planner
from trunkattn.planner.planner import StepTables
from trunkattn.planner.prefix_forest import Forest, build_forest
from trunkattn.planner.tiles.candidates import TilingRule
from trunkattn.planner.tiles.step import TiledStep
from trunkattn.planner.work_list import UNLIMITED

_SHARPNESS: Final = 4  # exponent of the transition from steps bound by weight reads to steps bound by arithmetic
_LOGITS: Final = 128_256  # the vocabulary for which `EngineTimes.sequence_us` was fitted
# Bandwidth of all-reduces among the cards of one host. Their fixed cost does not show in times measured on two cards.
_LINK_BYTES_PER_US: Final = 300_000
_PROMPT_SHARE: Final = 0.7  # the attention of prompts reaches this share of the rate of matrix products


class DecodeBatch(NamedTuple):
    """The block table and the lengths of the sequences that decode in a step, and their prefix forest."""

    block_table: NDArray[np.int32]
    seq_lens: NDArray[np.int32]
    forest: Forest

    @classmethod
    def of(cls, block_table: NDArray[np.int32], seq_lens: NDArray[np.int32], page_size: int) -> "DecodeBatch":
        """The batch of a block table."""
        ones = np.ones(len(seq_lens), np.int32)
        return cls(block_table, seq_lens, build_forest(block_table, seq_lens, ones, page_size, 1))


class AttentionTimes(NamedTuple):
    """Predicted µs of attention in one decode step: one by one (each request reads its own KV), and shared."""

    one_by_one_us: float
    shared_us: float


class OtherTimes(NamedTuple):
    """Predicted µs of a step without its attention.

    Attributes:
        weights: matrix products with weights, for decodes and prompt chunks.
        sampling: drawing the next tokens.
        layers: norms, rotations and other work of each layer, and all-reduces between cards.
        prompts: fixed time that a step with prompt chunks takes in addition.
    """

    weights: float
    sampling: float
    layers: float
    prompts: float


@dataclass(frozen=True)
class Prices:
    """A model on a card, or on several that share each layer. Raises ValueError if no kernel computes its attention.

    Attributes:
        shape: the model.
        card: one of the cards.
        page_size: tokens per page.
        tensor_parallel: number of cards.
        kv_cache_dtype: "auto" for 16 bits, "float8_e4m3fn" or "float8_e5m2".
    """

    shape: ModelShape
    card: Card
    page_size: int = 16
    tensor_parallel: int = 1
    kv_cache_dtype: str = "auto"

    def __post_init__(self) -> None:
        check_cards(self.shape, self.tensor_parallel)
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise ValueError(f"kv_cache_dtype={self.kv_cache_dtype!r}: expected one of {', '.join(KV_CACHE_DTYPES)}")
        _ = self.rule  # which raises if no kernel does; an assertion is left out under python -O

    @cached_property
    def times(self) -> EngineTimes:
        """What was fitted to the card."""
        assert self.card.model.engine  # `card_named` finds no other card
        return self.card.model.engine

    @cached_property
    def config(self) -> AttentionConfig:
        """A layer's attention on one card."""
        shape = self.shape
        return AttentionConfig(
            num_qo_heads=shape.num_qo_heads // self.tensor_parallel,
            num_kv_heads=max(1, shape.num_kv_heads // self.tensor_parallel),
            head_dim=shape.head_dim,
            page_size=self.page_size,
            dtype=torch.bfloat16,
            kv_dtype=None if self.kv_cache_dtype == "auto" else getattr(torch, self.kv_cache_dtype),
            latent_dim=shape.latent_dim,
            sm_scale=None if shape.latent_dim is None else shape.head_dim**-0.5,
        )

    @cached_property
    def decode_kernel(self) -> Kernel:
        """What computes the attention of decodes."""
        kernel = kernels_of(self.config, self.card).decode.kernel
        assert kernel
        return kernel

    @cached_property
    def rule(self) -> TilingRule:
        """The tiles of one card's attention."""
        kernels = kernels_of(self.config, self.card)
        forests = make_planner(self.config, gpu_device(self.card.num_sms, kernels.tiles[-1].block_m))
        return make_rule(self.config, kernels.tiles, self.card, forests.spec.model, may_fuse=True)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in the caches of all layers, on all cards."""
        return self.layer_token_bytes * self.shape.num_layers

    @property
    def layer_token_bytes(self) -> int:
        """Bytes of one token in the cache of one layer, on all cards."""
        return layer_token_bytes(self.shape, self.tensor_parallel, self.kv_cache_dtype)

    def attention(self, batch: DecodeBatch) -> AttentionTimes:
        """Attention of a decode step, of all layers."""
        one_by_one = shared = 0.0
        for window, layers in self.shape.layers_by_window.items():
            times = self.layer(batch, UNLIMITED if window is None else window)
            one_by_one, shared = one_by_one + times.one_by_one_us * layers, shared + times.shared_us * layers
        return AttentionTimes(one_by_one, shared)

    def read_shares(self, batch: DecodeBatch) -> tuple[float, float]:
        """Shares of the sequences' KV that a decode step reads, one by one and shared. Both are 1 unless layers have a
        sliding window."""
        if set(self.shape.windows) == {None}:
            return 1.0, 1.0
        one_by_one = shared = 0
        for window, layers in self.shape.layers_by_window.items():
            limit = UNLIMITED if window is None else window
            one_by_one += layers * int(np.minimum(batch.seq_lens, limit).sum())
            shared += layers * seen_tokens(batch, limit)
        every = max(1, int(batch.seq_lens.sum())), max(1, seen_tokens(batch))
        return one_by_one / every[0] / self.shape.num_layers, shared / every[1] / self.shape.num_layers

    def layer(self, batch: DecodeBatch, window: int = UNLIMITED) -> AttentionTimes:
        """Attention of one layer in a decode step."""
        starts = np.arange(len(batch.seq_lens) + 1, dtype=np.int32)
        tables = StepTables(batch.block_table, batch.seq_lens, starts, window)
        predicted = TiledStep(self.rule, batch.forest, tables).predict()
        if self.shape.latent_dim is None:
            tokens = np.minimum(batch.seq_lens, window).sum()
            one_by_one = float(self.flash_us(tokens, seen_tokens(batch, window)))
        else:
            per_query = [number for number, tiling in enumerate(self.rule.priced.tilings) if tiling.per_query]
            one_by_one = float(predicted[per_query].min()) / 1e3
        return AttentionTimes(one_by_one, float(predicted.min()) / 1e3)

    def scaled(
        self,
        times: AttentionTimes,
        priced: tuple[int, int],
        tokens: NDArray[np.int64],
        unique_tokens: NDArray[np.int64],
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Attention [steps] in µs, one by one and shared, of steps that differ little from one that was priced.

        Args:
            times: predicted for the step that was priced.
            priced: its tokens, and its tokens with each shared one counted once.
            tokens, unique_tokens: [steps] the same numbers for each of the other steps.
        """
        priced_tokens, priced_unique = max(1, priced[0]), max(1, priced[1])
        launch_us = self.times.flash_us
        fixed_us, shared_fixed_us = (min(self.shape.num_layers * launch_us, each) for each in times)
        more = self.flash_us(tokens, unique_tokens) - launch_us
        more /= self.flash_us(priced_tokens, priced_unique) - launch_us
        one_by_one = fixed_us + (times.one_by_one_us - fixed_us) * more
        return one_by_one, shared_fixed_us + (times.shared_us - shared_fixed_us) * (unique_tokens / priced_unique)

    def flash_us(self, tokens: Any, unique_tokens: Any) -> Any:
        """FlashAttention of one layer, in µs. tokens: sum over the sequences of the tokens that each sees;
        unique_tokens: the same with each shared token counted once."""
        times, token_bytes = self.times, self.rule.token_bytes
        wide_bytes = token_bytes * 2 / NUMBER_BYTES[self.kv_cache_dtype]  # of a token's numbers, if each had 16 bits
        read_us = unique_tokens * token_bytes / times.flash_bytes_per_us
        return times.flash_us + read_us + tokens * wide_bytes / times.flash_keys_per_us

    def other_us(self, num_sequences: int, num_decodes: int, num_prompt_tokens: int = 0) -> float:
        """A step without its attention, in µs: the sum of `other`, with the same arguments."""
        return sum(self.other(num_sequences, num_decodes, num_prompt_tokens))

    def other(self, num_sequences: int, num_decodes: int, num_prompt_tokens: int = 0) -> OtherTimes:
        """The parts of a step without its attention. num_sequences: sequences that get a token; num_decodes: those of
        them that decode; num_prompt_tokens: tokens of the step's prompt chunks."""
        shape, times, cards = self.shape, self.times, self.tensor_parallel
        num_tokens = num_decodes + num_prompt_tokens
        bytes_us = shape.bytes_read(num_tokens) / cards / self.card.model.times.bytes_per_us
        layers = shape.numbers_used() - shape.output_numbers
        flops = 2 * (layers * num_tokens + shape.output_numbers * num_sequences) / cards
        rate = times.prompt_flops_per_us if num_prompt_tokens else times.flops_per_us
        weights_us = (bytes_us**_SHARPNESS + (flops / rate) ** _SHARPNESS) ** (1 / _SHARPNESS)
        return OtherTimes(
            weights=float(weights_us),
            sampling=num_sequences * times.sequence_us * shape.vocab_size / _LOGITS,
            layers=shape.num_layers * (times.layer_us + self._reduce_us(num_tokens)),
            prompts=times.prompt_us if num_prompt_tokens else 0.0,
        )

    def prompt_attention_us(self, pairs: float) -> float:
        """Attention of prompt chunks in all layers, in µs. pairs: number of (prompt token, token that it sees) pairs,
        sliding windows ignored."""
        shape = self.shape
        numbers = shape.head_dim + (shape.latent_dim or shape.head_dim)
        flops = 2 * pairs * numbers * shape.num_qo_heads / self.tensor_parallel
        return flops * shape.num_layers / (_PROMPT_SHARE * self.times.flops_per_us)

    def _reduce_us(self, num_tokens: int) -> float:
        if self.tensor_parallel == 1:
            return 0.0
        return 2 * num_tokens * self.shape.hidden_size * 2 / _LINK_BYTES_PER_US


def seen_tokens(batch: DecodeBatch, window: int = UNLIMITED) -> int:
    """Number of tokens that the sequences of a decode step see, each shared token counted once."""
    forest = batch.forest
    longest_start = np.maximum(batch.seq_lens[forest.order] - window, 0)
    ranges = np.stack([forest.row_start, forest.row_end], axis=1).ravel()
    first = np.minimum.reduceat(np.append(longest_start, UNLIMITED), ranges)[::2]
    return int(np.maximum(forest.token_end - np.maximum(forest.token_start, first), 0).sum())
