"""The tokens that decode steps of a replay read, counted page by page from the block tables of its cache."""

from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.analysis.logs_of_tokens import Numbering, random_prompts
from trunkattn.analysis.simulation.engine import EngineSize, Job, SimulatedEngine
from trunkattn.analysis.simulation.sequences import TokenSource

from ..attention.cases import fraction

PAGE_SIZE = 4


def counted(rows: Sequence[tuple[Sequence[int], int]]) -> tuple[int, int]:
    """Tokens that sequences see, and the same with each page counted once. rows: pages and length of each sequence."""
    filled: dict[int, int] = {}
    for pages, length in rows:
        for place in range(-(-length // PAGE_SIZE)):
            tokens = min(PAGE_SIZE, length - place * PAGE_SIZE)
            filled[pages[place]] = max(filled.get(pages[place], 0), tokens)
    return sum(length for _, length in rows), sum(filled.values())


@settings(max_examples=fraction(6))
@given(
    seed=st.integers(0, 2**32 - 1),
    num_pages=st.sampled_from([30, 45, 80, 400]),
    max_num_seqs=st.sampled_from([3, 6, 32]),
    policy=st.sampled_from(["chunked_prefill", "prefill_first"]),
    caching=st.booleans(),
)
def test_tokens_that_are_read_are_those_in_the_pages(
    seed: int, num_pages: int, max_num_seqs: int, policy: str, caching: bool
) -> None:
    prompts = random_prompts(np.random.default_rng(seed), 12, 8, vocabulary=1000, most=60)
    numbering = Numbering(8)
    logged = [prompt.logged(line, numbering) for line, prompt in enumerate(prompts, start=1)]
    size = EngineSize(num_pages, PAGE_SIZE, max_num_seqs, 40, policy, caching)
    engine, waiting, done = SimulatedEngine(size, TokenSource(logged)), list(logged), 0
    cache, scheduler = engine.cache, engine.scheduler
    while waiting or scheduler.has_unfinished:
        while waiting and (prompts[len(logged) - len(waiting)].step <= done or not scheduler.has_unfinished):
            request = waiting.pop(0)
            engine.add(Job(request, request.num_output_tokens or 1))
        steps, count = engine.decodes(), 0
        if steps is not None:
            while count < steps.count and engine.run(1):
                rows = [(cache.pages(each.request_id), each.num_computed_tokens) for each in scheduler.running]
                assert (steps.tokens[count], steps.unique_tokens[count]) == counted(rows)
                assert steps.decoding == len(rows)
                count += 1
        if not count:
            steps = engine.schedule()
            before = [(each, each.num_computed_tokens, cache.pages(each.request_id)) for each in scheduler.running]
            engine.update()
            rows = [
                (pages, start + 1)
                for each, start, pages in before
                if start >= each.num_prompt_tokens and each.num_computed_tokens == start + 1
            ]
            assert (steps.decoding, steps.tokens[0], steps.unique_tokens[0]) == (len(rows), *counted(rows))
            count = 1
        done += count
