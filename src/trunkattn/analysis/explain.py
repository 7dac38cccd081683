"""One batch explained: its prefix forest, what each packing policy plans, reads and takes on a card, and why."""

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch

from trunkattn.analysis.list_price import list_ns
from trunkattn.analysis.prices import DecodeBatch, Prices
from trunkattn.analysis.records import Snapshot, TrieNode
from trunkattn.config import AttentionConfig
from trunkattn.gpu.kernel import kernels_of
from trunkattn.gpu.step import tile_stats, with_reasons
from trunkattn.gpu.step_choice import StepChoice
from trunkattn.gpu.steps import make_step_planner
from trunkattn.inputs import StepInputs, check_step
from trunkattn.names import POLICIES
from trunkattn.planner.planner import StepTables
from trunkattn.planner.prefix_forest import Forest, build_forest
from trunkattn.planner.work_list import PlanStats

_CPU: Final = torch.device("cpu")


@dataclass(frozen=True)
class Explained:
    """A policy's plan.

    Attributes:
        policy: its name.
        stats: what it reads, as `Plan.stats` tells.
        layer_us: predicted time of one layer's attention on one card.
        kv_bytes: KV bytes that all layers and cards read; those that two items read count twice.
    """

    policy: str
    stats: PlanStats
    layer_us: float
    kv_bytes: int


@dataclass(frozen=True)
class Explanation:
    """A decode batch, and what each policy plans for it.

    Attributes:
        snapshot: the prefix forest.
        num_requests: requests that decode.
        kv_bytes: KV bytes that all layers and cards read, if each request reads its own.
        unique_kv_bytes: KV bytes that they read, if each shared page is read once.
        alone: what reads each request's KV for itself: FlashAttention, or of a latent cache our own kernel.
        alone_us: its predicted time of one layer on one card.
        policies: one by one, in the order of `POLICIES`.
    """

    snapshot: Snapshot
    num_requests: int
    kv_bytes: int
    unique_kv_bytes: int
    alone: str
    alone_us: float
    policies: list[Explained]

    @property
    def auto(self) -> Explained:
        """The plan of policy auto."""
        return next(each for each in self.policies if each.policy == "auto")


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
    (table, lens, starts), _ = check_step(inputs, prices.page_size, None, _CPU)
    forest = Forest(*build_forest(table, lens, np.diff(starts), prices.page_size, 1))
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
    tokens, unique = int(lens.sum()), sum(node.tokens for node in nodes)
    return Explanation(
        snapshot=Snapshot(0.0, nodes),
        num_requests=len(lens),
        kv_bytes=tokens * prices.token_bytes,
        unique_kv_bytes=unique * prices.token_bytes,
        alone="FlashAttention" if prices.shape.latent_dim is None else "one by one",
        alone_us=prices.layer(DecodeBatch(table, lens, forest)).alone_us,
        policies=[_explained(policy, StepTables(table, lens, starts), prices) for policy in POLICIES],
    )


def _explained(policy: str, batch: StepTables, prices: Prices) -> Explained:
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
        kv_bytes=stats.kv_tokens_read * prices.token_bytes,
    )
