"""The replay's engine against the real scheduler step by step, and against the whole engine with a tiny model."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.analysis.logs_of_tokens import Numbering, Prompt, random_prompts
from trunkattn import LLM
from trunkattn.analysis.simulation.engine import EngineSize, Job, SimulatedEngine
from trunkattn.analysis.simulation.sequences import TokenSource
from trunkattn.engine.assembly import keys_per_token
from trunkattn.engine.engine import Engine
from trunkattn.engine.sampling_params import SamplingParams
from trunkattn.engine.scheduling.request import Request
from trunkattn.engine.scheduling.scheduler import Scheduler
from trunkattn.kv_cache.manager import CacheManager


class State(NamedTuple):
    """An engine between two steps."""

    step: int
    pages_in_use: int
    free_pages: int
    indexed_pages: int
    running: int
    waiting: int
    preemptions: int
    queries: int
    hits: int


def state(step: int, scheduler: Scheduler) -> State:
    cache, stats = scheduler.cache, scheduler.stats
    return State(
        step,
        cache.num_pages_in_use,
        cache.num_free_pages,
        len(cache.index),
        len(scheduler.running),
        len(scheduler.waiting),
        stats.preemptions,
        stats.prefix_cache_queries,
        stats.prefix_cache_hits,
    )


def make_scheduler(size: EngineSize) -> Scheduler:
    cache = CacheManager(size.num_pages, size.page_size, size.enable_prefix_caching)
    return Scheduler(cache, size.max_num_seqs, size.max_num_batched_tokens, size.scheduler_policy)


def really(prompts: list[Prompt], size: EngineSize) -> Iterator[State]:
    """The states of the scheduler itself, with the prompts' own tokens, one step at a time."""
    scheduler, waiting, step = make_scheduler(size), list(prompts), 0
    answers: dict[str, Iterator[int]] = {}
    while waiting or scheduler.has_unfinished:
        while waiting and (waiting[0].step <= step or not scheduler.has_unfinished):
            prompt = waiting.pop(0)
            sequences = [
                Request(
                    request_id=f"{len(answers) + index}",
                    token_ids=list(prompt.tokens),
                    num_prompt_tokens=len(prompt.tokens),
                    params=SamplingParams(),
                    max_tokens=len(answer),
                    arrival=len(answers),
                    index=index,
                )
                for index, answer in enumerate(prompt.answers)
            ]
            answers.update((each.request_id, iter(prompt.answers[each.index])) for each in sequences)
            sequences[0].children.extend(sequences[1:])
            scheduler.add(sequences[0])
        batch = scheduler.schedule()
        scheduler.update(batch, [next(answers[sample.request.request_id]) for sample in batch.samples])
        step += 1
        yield state(step, scheduler)


def replayed(prompts: list[Prompt], size: EngineSize, block_size: int) -> Iterator[State]:
    """The states of the replay, between which there may be several steps."""
    numbering = Numbering(block_size)
    logged = [prompt.logged(line, numbering) for line, prompt in enumerate(prompts, start=1)]
    engine, waiting, step = SimulatedEngine(size, TokenSource(logged)), list(logged), 0
    while waiting or engine.scheduler.has_unfinished:
        while waiting and (waiting[0].arrival <= step or not engine.scheduler.has_unfinished):
            request = waiting.pop(0)
            engine.add(Job(request, request.num_output_tokens))
        steps = engine.decodes()
        done = 0
        if steps is not None:
            until = steps.count if not waiting else max(1, int(waiting[0].arrival) - step)
            done = engine.run(min(steps.count, until))
        if done == 0:
            engine.schedule()
            engine.update()
            done = 1
        step += done
        yield state(step, engine.scheduler)
        engine.cache.check_integrity()


@given(
    seed=st.integers(0, 2**32 - 1),
    block_size=st.sampled_from([2, 4, 8, 16]),
    num_pages=st.sampled_from([30, 45, 80, 400]),
    max_num_seqs=st.sampled_from([3, 6, 32]),
    policy=st.sampled_from(["chunked_prefill", "prefill_first"]),
    caching=st.booleans(),
)
def test_hits_and_pages_are_those_of_the_scheduler_at_every_step(
    seed: int, block_size: int, num_pages: int, max_num_seqs: int, policy: str, caching: bool
) -> None:
    prompts = random_prompts(np.random.default_rng(seed), 12, block_size, vocabulary=1000, most=60)
    size = EngineSize(num_pages, 4, max_num_seqs, 40, policy, caching)
    real = {each.step: each for each in really(prompts, size)}
    told = list(replayed(prompts, size, block_size))
    assert told == [real.get(each.step) for each in told]
    assert told[-1].step == max(real)


def test_most_steps_are_taken_many_at_a_time() -> None:
    prompts = [Prompt(list(range(40 * i, 40 * i + 30)), [list(range(10_000, 10_200))], 0) for i in range(8)]
    size = EngineSize(num_pages=600, page_size=4, max_num_seqs=8, max_num_batched_tokens=256)
    told = list(replayed(prompts, size, 4))
    assert told[-1].step > 190
    assert len(told) < 10


def test_decodes_count_each_shared_page_once() -> None:
    trunk = list(range(64))
    prompts = [Prompt([*trunk, 1000 + i], [[7] * 40], 0) for i in range(4)]
    numbering = Numbering(4)
    logged = [prompt.logged(line, numbering) for line, prompt in enumerate(prompts, start=1)]
    engine = SimulatedEngine(EngineSize(400, 4, 8, 64), TokenSource(logged))
    for request in logged:
        engine.add(Job(request, 40))
    while (steps := engine.decodes()) is None:
        engine.schedule()
        engine.update()
    lengths = np.array([request.num_computed_tokens + 1 for request in engine.scheduler.running])
    assert steps.decoding == 4
    assert steps.tokens.tolist()[:3] == [lengths.sum(), lengths.sum() + 4, lengths.sum() + 8]
    assert steps.unique_tokens[0] == 64 + (lengths - 64).sum()


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random model of two layers."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        eos_token_id=None,
    )
    path = tmp_path_factory.mktemp("llama")
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return path


def asked_of(engine: Engine, prompts: list[Prompt], states: list[State]) -> list[Prompt]:
    """The prompts as the engine got them: a turn begins with the turn before it and the answer to that. Random prompts
    do not know the answers, so only the end of a turn's prompt is theirs. states: receives those after each step."""
    asked: list[Prompt] = []
    answered: dict[int, list[int]] = {}
    while len(asked) < len(prompts) or engine.has_unfinished:
        while len(asked) < len(prompts) and (prompts[len(asked)].step <= len(states) or not engine.has_unfinished):
            number, prompt = len(asked), prompts[len(asked)]
            if prompt.turn and number - 1 not in answered:
                break
            before = [*asked[-1].tokens, *answered[number - 1]] if prompt.turn else []
            tokens = [*before, *prompt.tokens[-5:]] if prompt.turn else prompt.tokens
            asked.append(replace(prompt, tokens=tokens, step=len(states)))
            engine.add_request(
                tokens,
                SamplingParams(
                    n=len(prompt.answers),
                    max_tokens=len(prompt.answers[0]),
                    temperature=5.0,
                    seed=number,
                    ignore_eos=True,
                    detokenize=False,
                ),
                request_id=f"{number}",
            )
        for output in engine.step():
            answered[int(output.request_id)] = list(output.outputs[0].token_ids)
        states.append(state(len(states) + 1, engine.scheduler))
    return asked


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num_pages", [64, 400])
def test_hits_and_pages_are_those_of_an_engine_with_a_model(tiny_llama: Path, seed: int, num_pages: int) -> None:
    """The log has what the engine was asked, and how long its answers were."""
    size = EngineSize(num_pages, 4, max_num_seqs=6, max_num_batched_tokens=40)
    llm = LLM(
        tiny_llama,
        page_size=4,
        num_pages=num_pages,
        max_num_seqs=size.max_num_seqs,
        max_num_batched_tokens=size.max_num_batched_tokens,
    )
    states: list[State] = []
    prompts = random_prompts(np.random.default_rng(seed), 10, 8, vocabulary=256, most=60)
    asked = asked_of(llm.engine, prompts, states)
    told = list(replayed(asked, replace(size, keys_per_token=keys_per_token(llm.info)), 8))
    assert told == [states[each.step - 1] for each in told]
    assert (told[-1].step, told[-1].hits > 0) == (len(states), True)
