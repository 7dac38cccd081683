"""The block table that a runner keeps from step to step: always the pages of the requests in its rows."""

from itertools import groupby
from typing import Any

import torch

from trunkattn import AttentionConfig, BatchAttention
from trunkattn.engine import Engine, ModelLimits, SamplingParams
from trunkattn.engine.runner import ModelRunner
from trunkattn.engine.scheduling.scheduled_batch import ScheduledBatch
from trunkattn.engine.scheduling.scheduler import Scheduler
from trunkattn.kv_cache.manager import CacheManager
from trunkattn.kv_cache.tensors import KVCache

PAGE = 4


class TableRunner(ModelRunner):
    """Updates the block table, compares it with the cache's, and computes nothing."""

    rows_of: dict[str, list[int]]

    def __init__(self) -> None:
        attention = BatchAttention(AttentionConfig(1, 1, 8, PAGE, torch.float32), "cpu")
        model: Any = None
        super().__init__(model, attention, [None], KVCache(1, 1, PAGE, 1, 8, torch.float32, "cpu"), 8, 256)
        self.rows_of = {}

    def execute(self, batch: ScheduledBatch, cache: CacheManager) -> torch.Tensor:
        table = self._update_block_table(batch.chunks, cache)
        for row, chunk in enumerate(batch.chunks):
            name = chunk.request.request_id
            pages = cache.pages(name)
            assert table[row, : len(pages)].tolist() == list(pages)
            self.rows_of.setdefault(name, []).append(row)
        return torch.zeros(sum(chunk.is_sampled for chunk in batch.chunks), 50)


def test_a_request_that_returns_to_a_row_has_the_pages_it_got_elsewhere() -> None:
    runner = TableRunner()
    engine = Engine(runner, Scheduler(CacheManager(200, PAGE, True), 8, 12), ModelLimits(50, 200))
    prefix = list(range(1, 9))
    engine.add_request(prefix, SamplingParams(temperature=0, max_tokens=3))
    # waits a step for the prefix, is computed in chunks, and forks
    engine.add_request(prefix + 3 * list(range(10, 50)), SamplingParams(temperature=0, max_tokens=30, n=2))
    engine.add_request([7, 8], SamplingParams(temperature=0, max_tokens=60))
    while engine.has_unfinished:
        engine.step()
    stays = [row for row, _ in groupby(runner.rows_of["2.0"])]
    assert len(stays) > len(set(stays)), "it returns to a row that it has left"
