"""One batch explained: its prefix forest, what each packing policy plans, reads and takes on a card, and why."""

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch

from trunkattn.analysis.pricing.list_price import list_ns
from trunkattn.analysis.pricing.prices import DecodeBatch, Prices, seen_tokens
from trunkattn.analysis.records import Snapshot, TrieNode
from trunkattn.config import AttentionConfig
from trunkattn.gpu.kernel import kernels_of
from trunkattn.gpu.step import tile_stats, with_reasons
from trunkattn.gpu.step_choice import StepChoice
from trunkattn.gpu.step_planners import make_step_planner
from trunkattn.names import POLICIES
from trunkattn.planner.planner import StepTables
from trunkattn.planner.prefix_forest import Forest, build_forest
from trunkattn.planner.work_list import UNLIMITED, PlanStats
from trunkattn.step_inputs import StepInputs, check_step

_CPU: Final = torch.device("cpu")


@dataclass(frozen=True)
class Explained:
    """A policy's plan for layers that are alike.

    Attributes:
        policy: its name.
        stats: what it reads, as `Plan.stats` tells.
        layer_us: predicted time of one layer's attention on one card.
        kv_bytes: KV bytes that these layers read on all cards; those that two items read count twice.
    """

    policy: str
    stats: PlanStats
    layer_us: float
    kv_bytes: int


@dataclass(frozen=True)
class ExplainedLayers:
    """The layers of one window, and what each policy plans for them.

    Attributes:
        window: tokens that a query sees at most, itself included; None: it sees all.
        count: number of layers.
        kv_bytes: KV bytes that they read on all cards, if each request reads its own.
        unique_kv_bytes: KV bytes that they read, if each shared page is read once.
        one_by_one_us: predicted time of one of them on one card, if each request reads its own.
        policies: one by one, in the order of `POLICIES`.
    """

    window: int | None
    count: int
    kv_bytes: int
    unique_kv_bytes: int
    one_by_one_us: float
    policies: list[Explained]

    @property
    def auto(self) -> Explained:
        """The plan of policy auto."""
        return next(each for each in self.policies if each.policy == "auto")


@dataclass(frozen=True)
class Explanation:
    """A decode batch, and what each policy plans for it.

    Attributes:
        snapshot: the prefix forest.
        num_requests: requests that decode.
        baseline: name of the kernel that reads each request's own KV: FlashAttention, or ours for a latent cache.
        layers: one for each window that the model has.
    """

    snapshot: Snapshot
    num_requests: int
    baseline: str
    layers: list[ExplainedLayers]

    @property
    def kv_bytes(self) -> int:
        """KV bytes that all layers and cards read, if each request reads its own."""
        return sum(each.kv_bytes for each in self.layers)

    @property
    def unique_kv_bytes(self) -> int:
        """KV bytes that they read, if each shared page is read once."""
        return sum(each.unique_kv_bytes for each in self.layers)

    @property
    def times_us(self) -> tuple[float, float]:
        """Predicted time of all layers on one card, one by one and under policy auto."""
        one_by_one = sum(each.count * each.one_by_one_us for each in self.layers)
        return one_by_one, sum(each.count * each.auto.layer_us for each in self.layers)


def explain(tables: tuple[np.ndarray, np.ndarray], prices: Prices) -> Explanation:
    """Plans a decode batch with every policy, as a card would be given it. Needs no GPU.

    Args:
        tables: block_table [num_requests, max_pages] and seq_lens [num_requests], integers.
        prices: the model, the card and the page size.

    Raises:
        TypeError, ValueError: naming what of the tables is wrong.
    """
    block_table, seq_lens = (torch.from_numpy(np.ascontiguousarray(array)) for array in tables)
    inputs = StepInputs(block_table, seq_lens, None, None, None)
    step = check_step(inputs, prices.page_size, None, _CPU)
    query_lens = np.diff(step.query_start_loc)
    forest = Forest(*build_forest(step.block_table, step.seq_lens, query_lens, prices.page_size, 1))
    nodes = [
        TrieNode(
            parent=int(forest.parent[node]),
            start=int(forest.token_start[node]),
            tokens=int(forest.token_end[node] - forest.token_start[node]),
            sequences=int(forest.row_end[node] - forest.row_start[node]),
            line=int(forest.order[forest.row_start[node]]),
        )
        for node in range(len(forest.parent))
    ]
    batch = DecodeBatch(step.block_table, step.seq_lens, forest)
    return Explanation(
        snapshot=Snapshot(0.0, nodes),
        num_requests=len(seq_lens),
        baseline="FlashAttention" if prices.shape.latent_dim is None else "one by one",
        layers=[_layers(window, count, batch, prices) for window, count in prices.shape.layers_by_window.items()],
    )


def _layers(window: int | None, count: int, batch: DecodeBatch, prices: Prices) -> ExplainedLayers:
    limit = UNLIMITED if window is None else window
    token_bytes = prices.layer_token_bytes * count
    starts = np.arange(len(batch.seq_lens) + 1, dtype=np.int32)
    tables = StepTables(batch.block_table, batch.seq_lens, starts, limit)
    return ExplainedLayers(
        window=window,
        count=count,
        kv_bytes=int(np.minimum(batch.seq_lens, limit).sum()) * token_bytes,
        unique_kv_bytes=seen_tokens(batch, limit) * token_bytes,
        one_by_one_us=prices.layer(batch, limit).one_by_one_us,
        policies=[_explained(policy, tables, prices, token_bytes) for policy in POLICIES],
    )


def _explained(policy: str, batch: StepTables, prices: Prices, token_bytes: int) -> Explained:
    config: AttentionConfig = replace(prices.config, policy=policy)
    kernels = kernels_of(config, prices.card)
    planner = make_step_planner(config, kernels, prices.card, _CPU, None)
    planned = planner.plan(batch, None)
    stats = tile_stats(planned.tiles, planned.tables, planner.rule, planned.described())
    chosen_ns = int(planned.choice.times_ns.min()) if isinstance(planned.choice, StepChoice) else None
    return Explained(
        policy=policy,
        stats=with_reasons(stats, kernels.decode.reasons),
        layer_us=(list_ns(planner.rule, planned.tiles) if chosen_ns is None else chosen_ns) / 1e3,
        kv_bytes=stats.kv_tokens_read * token_bytes,
    )
