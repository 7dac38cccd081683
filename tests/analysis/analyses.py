"""Analyses made by hand, for the tests of what is written about one."""

import math
from dataclasses import replace

import numpy as np

from trunkattn.analysis.records import (
    Analysis,
    Ceiling,
    FleetReplay,
    Log,
    LoggedRequest,
    Moment,
    Replay,
    SkippedLine,
    Snapshot,
    Spoiler,
    TrieNode,
)
from trunkattn.analysis.texts import Texts

HOSTILE = '<script>document.title = "taken"</script><img src="http://example.com/x.png">'
SECRET = "the patient is called Ada"  # what the texts of the log say


def busy_replay(name: str, concurrency: int, gain: float, rate: float | None = None) -> Replay:
    """A replay in which sharing saves `gain` of the time per token."""
    decoding = 0.9 * concurrency
    moments = []
    for number in range(60):
        wave = 0.7 + 0.3 * math.sin(number / 6)
        kv_bytes, step_us = 2e9 * wave * concurrency / 64, 7000 + 60 * decoding * wave
        moments.append(
            Moment(
                start=30.0 * number,
                seconds=30.0,
                num_steps=0 if number == 20 else 1000,
                decoding=decoding * wave,
                waiting=2.0 * wave,
                kv_bytes=kv_bytes,
                unique_kv_bytes=kv_bytes * (1 - 2 * gain),
                attention_us=step_us * 0.5,
                shared_attention_us=step_us * (0.5 - gain),
                step_us=step_us,
                shared_step_us=step_us * (1 - gain),
                prompt_tokens=0 if number == 20 else 100_000,
                cached_tokens=0 if number == 20 else int(40_000 * wave),
            )
        )
    tpot = 7.0 + 0.06 * decoding
    return Replay(
        name=name,
        concurrency=concurrency,
        rate=rate,
        seconds=1800.0,
        num_requests=12_000,
        num_output_tokens=4_100_000,
        hit_rate=0.394,
        tpot_ms=tpot,
        shared_tpot_ms=tpot * (1 - gain),
        ttft_ms=431.0,
        shared_ttft_ms=402.0,
        tokens_per_s=1000 * decoding / tpot,
        shared_tokens_per_s=1000 * decoding / tpot / (1 - gain),
        num_decode_steps=45_000,
        kv_bytes=9e13,
        unique_kv_bytes=9e13 * (1 - 2 * gain),
        preemptions=3,
        moments=moments,
        snapshots=[snapshot(300.0 * number, 8 + 6 * number) for number in range(6)],
    )


def snapshot(time: float, sequences: int) -> Snapshot:
    """A trunk that all read, two documents, and what each sequence has of its own; one sequence apart from them."""
    first = sequences // 3
    nodes = [TrieNode(-1, 0, 2048, sequences, 1)]
    for start, number, tokens in ((2048, first, 4096), (2048, sequences - first, 1024)):
        parent = len(nodes)
        nodes.append(TrieNode(0, start, tokens, number, parent))
        nodes += [TrieNode(parent, start + tokens, 120 + 31 * leaf % 700, 1, leaf + 1) for leaf in range(number)]
    nodes.append(TrieNode(-1, 0, 3000, 1, 2))
    return Snapshot(time, nodes)


def log(num_requests: int = 40) -> Log:
    requests = [
        LoggedRequest(line, 0.5 * line, 4000, 300, np.arange(8, dtype=np.int64), 512, session=f"session of {SECRET}")
        for line in range(1, num_requests + 1)
    ]
    return Log(
        source=f"log of {HOSTILE}.jsonl",
        format="chat JSONL",
        requests=requests,
        num_lines=num_requests + 14,
        num_skipped=14,
        skipped=[SkippedLine(7, f"expected a list named messages, not {HOSTILE}"), SkippedLine(9, "not JSON")],
        tokens_from="an estimate of 4 bytes per token",
        assumptions=["A token is 4 bytes of text."],
        texts=Texts(f"{SECRET}, and number {line} {HOSTILE}" for line in range(1, num_requests + 1)),
    )


def busy_analysis() -> Analysis:
    """An analysis with everything in it."""
    loops = [busy_replay(f"{number} at a time", number, gain) for number, gain in ((1, 0.0), (4, 0.02), (16, 0.11))]
    spoilers = [
        Spoiler(
            kind="timestamp",
            where="system message, token 37 of 2,210",
            num_requests=8120,
            token=37,
            shared_after=2173,
            varying_tokens=9.0,
            examples=[f"2026-11-26T10:00:00 {SECRET}", HOSTILE],
            lines=[1, 5, 9],
            advice="Move the timestamp after the instructions that all requests share.",
            gain_tpot=0.21,
            gain_prompt_tokens=17_644_760,
        ),
        Spoiler("block", "block 3", 12, 1536, 4096, 512.0, [], [3], "Look at what varies in this block."),
    ]
    fleet = [
        FleetReplay(route, 4, hit, 11.0, 11.0 - 20 * hit, 300.0, 280.0, 4000.0, 4400.0, balance, 4e13, 3e13)
        for route, hit, balance in (("random", 0.1, 1.02), ("prefix", 0.38, 1.4), ("sharers", 0.3, 1.9))
    ]
    return Analysis(
        log=log(),
        card="NVIDIA H100",
        model="llama-3-8b",
        token_bytes=131_072,
        replays=[busy_replay("as logged", 256, 0.17), *loops, busy_replay("2 requests/s", 256, 0.05, 2.0)],
        spoilers=spoilers,
        assumptions=["The engine keeps prefixes in its cache.", "Weights are read once per step."],
        verdict="At 58 requests at a time sharing gains 17 %.",
        ceiling=Ceiling(0.41, 0.455),
        fleet=fleet,
    )


def quiet_analysis() -> Analysis:
    """An analysis of a log in which nothing is shared and all lines were taken."""
    replay = replace(busy_replay("3 at a time", 3, 0.01), hit_rate=0.0, snapshots=[])
    clean = replace(log(3), source="quiet.jsonl", num_lines=3, num_skipped=0, skipped=[], texts=None, assumptions=[])
    verdict = "At 3 requests at a time, 1 % gained."
    return Analysis(clean, "NVIDIA H200", "qwen3-8b", 147_456, [replay], [], [], verdict, Ceiling(0.0, 0.0))
