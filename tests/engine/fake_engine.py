"""An engine around a fake model, which answers every prompt with one text."""

from collections.abc import Sequence

import torch

from trunkattn.engine import Engine, ModelLimits, RequestOutput
from trunkattn.engine.runner import StepReads
from trunkattn.engine.scheduling.scheduled_batch import ScheduledBatch
from trunkattn.engine.scheduling.scheduler import Scheduler
from trunkattn.kv_cache.manager import CacheManager

VOCAB = 128
EOS = 0


class AsciiTokenizer:
    """Token ids are character codes; 0 is special."""

    def decode(
        self, token_ids: Sequence[int], skip_special_tokens: bool = False, spaces_between_special_tokens: bool = True
    ) -> str:
        special = " <eos>" if spaces_between_special_tokens else "<eos>"
        return "".join(map(chr, token_ids)).replace("\0", "" if skip_special_tokens else special)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [*([EOS] if add_special_tokens else []), *map(ord, text)]


class FakeRunner:
    """Answers every prompt with the same text, then end-of-sequence; fails when told to.

    The logits of a prompt that begins with `broken` are not finite from its third token on.
    """

    def __init__(self, answer: str) -> None:
        self.answer = [*map(ord, answer), EOS]
        self.last_reads = StepReads(3.0, 5.0)
        self.fails = False
        self.broken = -1

    def execute(self, batch: ScheduledBatch, cache: CacheManager) -> torch.Tensor:
        if self.fails:
            raise RuntimeError("out of luck")
        logits = torch.full((sum(chunk.is_sampled for chunk in batch.chunks), VOCAB), -10.0)
        sampled = [chunk.request for chunk in batch.chunks if chunk.is_sampled]
        for row, request in zip(logits, sampled, strict=True):
            row[self.answer[min(request.num_output_tokens, len(self.answer) - 1)]] = 10.0
            if request.token_ids[0] == self.broken and request.num_output_tokens >= 2:
                row[5] = float("nan")
        return logits


def make_engine(
    answer: str = "hello world",
    num_pages: int = 100,
    has_tokenizer: bool = True,
    max_step_seconds: float | None = None,
) -> Engine:
    scheduler = Scheduler(CacheManager(num_pages, 4), 8, 32, max_step_seconds=max_step_seconds)
    limits = ModelLimits(VOCAB, max_model_len=num_pages * 4, eos_token_ids=frozenset({EOS}))
    return Engine(FakeRunner(answer), scheduler, limits, AsciiTokenizer() if has_tokenizer else None)


def runner_of(engine: Engine) -> FakeRunner:
    assert isinstance(engine.runner, FakeRunner)
    return engine.runner


def run(engine: Engine) -> dict[str, RequestOutput]:
    """Steps until everything is finished; the last output of each request."""
    outputs: dict[str, RequestOutput] = {}
    while engine.has_unfinished:
        for output in engine.step():
            assert output.request_id not in outputs or not outputs[output.request_id].finished
            outputs[output.request_id] = output
    assert engine.usage().pages_held == 0
    return outputs
