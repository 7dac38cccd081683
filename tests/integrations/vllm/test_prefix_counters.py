"""The replay of `trunkattn analyze` against the prefix-cache counters of vLLM, on the same trace: a log of prompts."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from vllm import SamplingParams

from trunkattn.analysis.reading.log import read_log
from trunkattn.analysis.simulation.engine import EngineSize, Job, SimulatedEngine
from trunkattn.analysis.simulation.load import Workload

from .engine import make_llm, shut_down
from .models import VOCABULARY

PAGE = 32
REQUESTS, TRUNKS = 200, 12
POINTS = 2.0  # by which hit rates may differ


class Asked(NamedTuple):
    """A request of the trace."""

    prompt: list[int]
    answer_tokens: int


class Counters(NamedTuple):
    """Prompt tokens that were looked up in the prefix cache, and found there; sequences that lost their pages."""

    queries: int
    hits: int
    preemptions: int

    @property
    def percent(self) -> float:
        """Share of the tokens that were found."""
        return 100.0 * self.hits / self.queries


def trace(seed: int) -> list[Asked]:
    """Requests of which few trunks have most; a trunk ends anywhere in a page, and every fourth begins as another."""
    rng = random.Random(seed)

    def text(length: int) -> list[int]:
        return [rng.randrange(3, VOCABULARY) for _ in range(length)]

    trunks: list[list[int]] = []
    for number in range(TRUNKS):
        begin = trunks[number - 1][:96] if number % 4 == 3 else []
        trunks.append(begin + text(rng.randrange(80, 320)))
    weights = [1.0 / (1 + number) for number in range(TRUNKS)]
    chosen = rng.choices(trunks, weights, k=REQUESTS)
    return [Asked(trunk + text(rng.randrange(1, 160)), rng.randrange(2, 24)) for trunk in chosen]


def in_vllm(model: Path, asked: list[Asked], size: EngineSize) -> Counters:
    """What vLLM counts. One of its blocks stands for no page, so it gets one more."""
    options = {"num_gpu_blocks_override": size.num_pages + 1, "block_size": size.page_size, "async_scheduling": False}
    options |= {"max_num_seqs": size.max_num_seqs, "max_num_batched_tokens": size.max_num_batched_tokens}
    params = [
        SamplingParams(temperature=0, max_tokens=each.answer_tokens, ignore_eos=True, detokenize=False)
        for each in asked
    ]
    llm = make_llm(model, **options)
    try:
        llm.generate([{"prompt_token_ids": each.prompt} for each in asked], params, use_tqdm=False)
        found = {metric.name.removeprefix("vllm:"): getattr(metric, "value", 0) for metric in llm.get_metrics()}
        return Counters(
            *(int(found[name]) for name in ("prefix_cache_queries", "prefix_cache_hits", "num_preemptions"))
        )
    finally:
        shut_down()


def in_replay(path: Path, asked: list[Asked], size: EngineSize) -> Counters:
    """What the replay's engine counts of a log of the same requests. Its clocks, which need Triton, change nothing."""
    lines = [{"prompt_token_ids": each.prompt, "output_tokens": each.answer_tokens} for each in asked]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    workload = Workload.of(read_log(path).requests, size, 1)
    assert len(workload.jobs) == len(asked)
    engine = SimulatedEngine(size, workload.source)
    for logged, answer_tokens in workload.jobs:
        engine.add(Job(logged, answer_tokens))
    while engine.scheduler.has_unfinished:
        steps = engine.decodes()
        if steps is None or not engine.run(steps.count):
            engine.schedule()
            engine.update()
    stats = engine.scheduler.stats
    return Counters(stats.prefix_cache_queries, stats.prefix_cache_hits, stats.preemptions)


@pytest.mark.parametrize(
    ("seed", "size"),
    [
        (1, EngineSize(120, PAGE, 8, 256)),
        (2, EngineSize(70, PAGE, 8, 512)),
        (3, EngineSize(40, PAGE, 8, 64)),
    ],
    ids=("evicts", "evicts much", "preempts"),
)
def test_hit_rates_are_those_of_vllm(model: Callable[[str], Path], tmp_path: Path, seed: int, size: EngineSize) -> None:
    asked = trace(seed)
    theirs, ours = in_vllm(model("llama"), asked, size), in_replay(tmp_path / "log.jsonl", asked, size)
    print(f"vLLM {theirs}, {theirs.percent:.2f} %; replay {ours}, {ours.percent:.2f} %")
    assert ours.queries == theirs.queries == sum(len(each.prompt) for each in asked)
    assert abs(ours.percent - theirs.percent) <= POINTS
