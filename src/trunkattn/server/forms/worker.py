"""A process that tries forms, so that one which overflows its stack, its memory or its time ends no server.

It is run as a file and imports nothing of the package. It reads lines of JSON: first the tokenizer and the limits, then
one grammar a line. It answers each with a line: what is wrong, or null, the bytes that the compiled form took, and the
seconds that the slowest token of two answers took.
"""

import json
import os
import random
import resource
import sys
import threading
import time
from typing import Any

import llguidance
import numpy as np
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

STACK_BYTES = 2 << 20  # less than any thread of the server has: what compiles here overflows no stack there
NICENESS = 10
WALK_TOKENS = 24


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def limit(what: int, most: int) -> None:
    """Lowers one of the system's limits of this process. Whoever started the server may have set a lower one."""
    _, hard = resource.getrlimit(what)
    resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def limit_cpu(seconds: float) -> None:
    """Lets the system end this process after this many more seconds of processor time."""
    limit(resource.RLIMIT_CPU, int(time.process_time() + seconds) + 1)


def walk(matcher: Any, num_tokens: int, mask_seconds: float, openers: list[int], took: list[float]) -> str | None:
    """What goes wrong in the first tokens of a random answer; None: nothing. openers: tokens that it has wherever it
    may, the first of them first. took: gets the seconds of each token."""
    bits, chance = allocate_token_bitmask(1, num_tokens), random.Random(0)
    for _ in range(WALK_TOKENS):
        began = time.thread_time()
        fill_next_token_bitmask(matcher, bits)
        if matcher.is_error():
            return str(matcher.get_error()).partition("<state>")[0]
        took.append(time.thread_time() - began)
        if took[-1] > mask_seconds:
            return f"a token of it takes longer than {mask_seconds} s"
        if matcher.is_stopped():
            return None
        allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
        if not len(allowed):
            return "no token can follow"
        opening = (token_id for token_id in openers if token_id in allowed)
        matcher.consume_token(next(opening, int(allowed[chance.randrange(len(allowed))])))
        if matcher.is_stopped() and not matcher.is_error():
            return None
    return None


def openers_of(tokens: Any) -> list[int]:
    """The tokens that begin an object, a list and a text of JSON. Many names may follow the first."""
    found = (tokens.tokenize_str(text) for text in ('{"', "{", "[", '"'))
    return [token_ids[0] for token_ids in found if len(token_ids) == 1]


def attempt(tokens: Any, grammar: str, limits: dict[str, Any]) -> tuple[str | None, float]:
    """What is wrong with a grammar, or None; and the seconds of the slowest token of two answers, a random one and one
    that opens objects. The first token does not count: what may be first is found before the engine has the request."""
    matcher = llguidance.LLMatcher(tokens, grammar, log_level=0)
    if matcher.is_error():
        return str(matcher.get_error()).partition("<state>")[0], 0.0
    slowest = 0.0
    for openers in ([], openers_of(tokens)):
        limit_cpu(limits["cpu_seconds"])
        took: list[float] = []
        failure = walk(matcher.deep_copy(), tokens.vocab_size, limits["mask_seconds"], openers, took)
        if failure is not None:
            return failure, slowest
        slowest = max(slowest, *took[1:], 0.0)
    return None, slowest


def serve() -> None:
    """Answers line by line until the input ends."""
    limits = json.loads(sys.stdin.readline())
    tokens = llguidance.LLTokenizer(limits["tokenizer"], n_vocab=limits["num_tokens"], eos_token=limits["eos"])
    limit(resource.RLIMIT_AS, limits["memory_bytes"])
    print("ready", flush=True)
    for line in sys.stdin:
        limit_cpu(limits["cpu_seconds"])
        before = resident_bytes()
        failure, slowest = attempt(tokens, json.loads(line), limits)
        grown = max(0, resident_bytes() - before)
        limit_cpu(1e9)
        reason = None if failure is None else " ".join(failure.split())[:300]
        print(json.dumps([reason, grown, slowest]), flush=True)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if os.getpgrp() != os.getpid():  # Python 3.10 starts no process in a group of its own
        os.setpgrp()
    os.nice(NICENESS)
    threading.stack_size(STACK_BYTES)
    worker = threading.Thread(target=serve)
    worker.start()
    worker.join()
