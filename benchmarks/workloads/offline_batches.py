"""Offline batches of random token ids, the same for every engine that is compared.

    python -m benchmarks.workloads.offline_batches FILE

writes one as JSON: `{"prompts": [[token id, ...], ...], "max_tokens": int}`.
"""

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.lib.options import integer

MOST = 2**31 - 1  # of each option


@dataclass(frozen=True)
class Workload:
    """A batch of requests that arrive together.

    Attributes:
        prompts: token ids of each request.
        max_tokens: output tokens of every request; end-of-sequence tokens are to be ignored.
    """

    prompts: list[list[int]]
    max_tokens: int


@dataclass(frozen=True)
class WorkloadShape:
    """Sizes of a batch whose prompts share one prefix, all in tokens.

    Attributes:
        num_requests: requests in the batch, >= 1.
        shared_tokens: length of the prefix that every prompt starts with, >= 0; 0 shares nothing.
        private_tokens: tokens of its own that each prompt ends with, >= 1.
        max_tokens: output tokens of every request, >= 1.
    """

    num_requests: int = 32
    shared_tokens: int = 2048
    private_tokens: int = 64
    max_tokens: int = 128

    def __post_init__(self) -> None:
        for name, least in {"num_requests": 1, "shared_tokens": 0, "private_tokens": 1, "max_tokens": 1}.items():
            value = getattr(self, name)
            if value < least:
                raise ValueError(f"{name}: expected >= {least}, got {value}")


SHARED = WorkloadShape()
UNSHARED = WorkloadShape(shared_tokens=0, private_tokens=256)


def make_workload(shape: WorkloadShape, vocab_size: int, seed: int = 0) -> Workload:
    """Draw the token ids of a batch uniformly from [0, vocab_size).

    The same arguments always give the same ids.

    Raises:
        ValueError: `vocab_size` < 2.
    """
    if vocab_size < 2:
        raise ValueError(f"vocab_size: expected >= 2, got {vocab_size}")
    generator = np.random.default_rng(seed)
    shared = generator.integers(vocab_size, size=shape.shared_tokens).tolist()
    private = generator.integers(vocab_size, size=(shape.num_requests, shape.private_tokens)).tolist()
    return Workload(prompts=[shared + row for row in private], max_tokens=shape.max_tokens)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Write a batch of random prompts as JSON.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("output", type=Path, help="JSON file to write")
    parser.add_argument(
        "--num-requests", type=integer(1, MOST), default=SHARED.num_requests, help="requests in the batch"
    )
    parser.add_argument(
        "--shared-tokens", type=integer(0, MOST), default=SHARED.shared_tokens, help="prefix common to all prompts"
    )
    parser.add_argument(
        "--private-tokens", type=integer(0, MOST), default=SHARED.private_tokens, help="rest of each prompt"
    )
    parser.add_argument(
        "--max-tokens", type=integer(1, MOST), default=SHARED.max_tokens, help="output tokens per request"
    )
    parser.add_argument(
        "--vocab-size", type=integer(2, MOST), default=49152, help="token ids are below this; SmolLM2 has 49152"
    )
    parser.add_argument("--seed", type=integer(0, MOST), default=0, help="seed of the random token ids")
    arguments = parser.parse_args()
    shape = WorkloadShape(
        num_requests=arguments.num_requests,
        shared_tokens=arguments.shared_tokens,
        private_tokens=arguments.private_tokens,
        max_tokens=arguments.max_tokens,
    )
    workload = make_workload(shape, arguments.vocab_size, arguments.seed)
    arguments.output.write_text(json.dumps(asdict(workload)))


if __name__ == "__main__":
    main()
