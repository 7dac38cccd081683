"""Workloads, each run of which ends when its last request is answered; the prefix cache is emptied before the next:

conversation: Poisson arrivals with PAT's three-level system instruction; private parts as long as the trace's inputs,
4096 tokens at most, outputs as long as its outputs, 512 at most; without a trace, drawn like them.
toolagent: Poisson arrivals of turns of agents' sessions; a turn's prompt begins with its session's earlier turns.
documents: Poisson arrivals of documents of 4k to 10k tokens, each with a burst of 16 short questions within half a
second; answers of 64 to 256 tokens.
trace: a stretch from the middle of the trace, its gaps divided by one factor so that the mean rate is the one asked
for; inputs cut to 16 blocks of 512 tokens, outputs to 512.
"""

import argparse
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.workloads.serving import CONVERSATION_LEVELS, agent_requests, conversation_lengths, poisson_arrivals
from benchmarks.workloads.traces import arrival_ms, read_trace
from trunkattn.analysis.formats.mooncake import BLOCK_SIZE
from trunkattn.analysis.records import LoggedRequest

RATES = {"conversation": (3.0, 5.0), "toolagent": (2.5, 4.0), "documents": (6.0, 12.0), "trace": (1.5, 2.5)}  # a second
LONGEST_PRIVATE, LONGEST_BLOCKS, LONGEST_OUTPUT, LONGEST_PROMPT = 4096, 16, 512, 11_000
LANGUAGES, COUNTRIES = 4, 8
QUESTIONS, BURST_SECONDS = 16, 0.5  # of a document
SEED = 0
QUICK_RATE, QUICK_SECONDS = 4.0, 5.0


class Sizes(NamedTuple):
    """Least and most tokens of the workload documents."""

    document: tuple[int, int] = (4096, 10_000)
    question: tuple[int, int] = (16, 96)
    answer: tuple[int, int] = (64, 256)


SIZES = Sizes()
QUICK_SIZES = Sizes((64, 128), (8, 16), (8, 16))


@dataclass(frozen=True)
class Arrival:
    """A request. at: seconds from the start. parts: (name, tokens) in order; a name stands for the same tokens in all
    requests."""

    at: float
    parts: tuple[tuple[Hashable, int], ...]
    output_tokens: int

    def prompt(self, vocabulary: int) -> list[int]:
        """A part's tokens, drawn by its name: a shorter part of a name begins a longer one."""
        tokens: list[int] = []
        for name, size in self.parts:
            seed = [SEED, *str(name).encode()]
            tokens += np.random.default_rng(seed).integers(0, vocabulary, size).tolist()
        return tokens


def poisson(rate: float, seconds: float) -> NDArray[np.float64]:
    """Arrival times in [0, seconds)."""
    times = poisson_arrivals(int(2 * rate * seconds) + 100, rate, SEED)
    return times[times < seconds]


def conversation(rate: float, seconds: float, trace: Sequence[LoggedRequest]) -> list[Arrival]:
    """Arrivals of conversations."""
    rng = np.random.default_rng(SEED)
    root, language_tokens, country_tokens = CONVERSATION_LEVELS
    found, times = [], poisson(rate, seconds)
    generated = conversation_lengths(len(times), SEED)
    for number, at in enumerate(times):
        language, country = int(rng.integers(LANGUAGES)), int(rng.integers(COUNTRIES))
        if trace:
            drawn = trace[int(rng.integers(len(trace)))]
            private, output = drawn.num_prompt_tokens, drawn.num_output_tokens or 0
        else:
            private, output = map(int, generated[number])
        parts = (
            ("root", root), (("language", language), language_tokens), (("country", language, country), country_tokens),
            (("private", number), max(1, min(private, LONGEST_PRIVATE))),
        )  # fmt: skip
        found.append(Arrival(float(at), parts, max(2, min(output, LONGEST_OUTPUT))))
    return found


def toolagent(rate: float, seconds: float) -> list[Arrival]:
    """Arrivals of tool agents; a prompt over LONGEST_PROMPT tokens is left out, as its session's later ones are."""
    times = poisson(rate, seconds)
    fitting = [turn for turn in agent_requests(4 * len(times), SEED) if turn.input_tokens < LONGEST_PROMPT]
    return [
        Arrival(
            float(at),
            (*turn.prefix, (("turn", turn.session, turn.turn), turn.new_tokens)),
            max(2, min(turn.output_tokens, LONGEST_OUTPUT)),
        )
        for at, turn in zip(times, fitting, strict=False)
    ]


def documents(rate: float, seconds: float, sizes: Sizes = SIZES) -> list[Arrival]:
    """Arrivals of questions on documents."""
    rng, found = np.random.default_rng(SEED), list[Arrival]()
    for number, at in enumerate(poisson(rate / QUESTIONS, seconds)):
        document = (("document", number), int(rng.integers(*sizes.document)))
        for later in np.sort(rng.uniform(0, BURST_SECONDS, QUESTIONS)).tolist():
            question = (("question", number, len(found)), int(rng.integers(*sizes.question)))
            found.append(Arrival(float(at) + later, (document, question), int(rng.integers(*sizes.answer))))
    return sorted(found, key=lambda arrival: arrival.at)


def stretch(rate: float, seconds: float, trace: Sequence[LoggedRequest]) -> list[Arrival]:
    """Arrivals of a stretch of the trace."""
    wanted = round(rate * seconds)
    chosen = trace[len(trace) // 2 :][:wanted]
    start, end = arrival_ms(chosen[0]), arrival_ms(chosen[-1])
    factor = (end - start) / (seconds * 1e3)
    found = []
    for request in chosen:
        blocks = request.blocks[:LONGEST_BLOCKS].tolist()
        size = min(request.num_prompt_tokens, len(blocks) * BLOCK_SIZE)
        sizes = [min(BLOCK_SIZE, size - at * BLOCK_SIZE) for at in range(len(blocks))]
        parts = tuple((("block", block), tokens) for block, tokens in zip(blocks, sizes, strict=True))
        at = (arrival_ms(request) - start) / 1e3 / factor
        found.append(Arrival(at, parts, max(2, min(request.num_output_tokens or 0, LONGEST_OUTPUT))))
    return found


def wanted_runs(arguments: argparse.Namespace) -> dict[str, list[Arrival]]:
    """Workload and rate, by name. arguments: workloads, scale, seconds, trace, quick."""
    if arguments.quick:
        return {f"documents {QUICK_RATE:g}/s": documents(QUICK_RATE, QUICK_SECONDS, QUICK_SIZES)}
    trace = read_trace(arguments.trace) if arguments.trace else ()
    runs = {}
    for workload in arguments.workloads:
        for rate in [rate * arguments.scale for rate in RATES[workload]]:
            if workload == "conversation":
                runs[f"{workload} {rate:g}/s"] = conversation(rate, arguments.seconds, trace)
            elif workload == "toolagent":
                runs[f"{workload} {rate:g}/s"] = toolagent(rate, arguments.seconds)
            elif workload == "documents":
                runs[f"{workload} {rate:g}/s"] = documents(rate, arguments.seconds)
            elif trace:
                runs[f"{workload} {rate:g}/s"] = stretch(rate, arguments.seconds, trace)
    return runs
