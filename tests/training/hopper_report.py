"""Run by test_hopper_forward in a process of its own, in which Triton compiles. Arguments: names of kernels (all, if
there are none).

Prints JSON: kernel -> registers, spilled bytes, shared bytes, named barriers, and whether products are serialized.
"""

import json
import sys
from dataclasses import asdict
from functools import partial
from itertools import product
from typing import Any

from benchmarks.kernels.compile_kernels import compile_hopper_forward, compile_hopper_queries
from benchmarks.kernels.cross_compile import Target

VARIANTS: dict[str, dict[str, Any]] = {
    "causal": {},
    "full": {"causal": False},
    "packed": {"packed": True},
    "packed full": {"packed": True, "causal": False},
    "tree": {"tree": True},
    "window": {"window": True},
    "window full": {"window": True, "causal": False},
    "options": {"packed": True, "window": True, "soft_cap": 30.0, "sinks": True},
    "options tree": {"tree": True, "window": True, "soft_cap": 30.0, "sinks": True},
}
HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256), (128, 256), (256, 128))


def main() -> None:
    kernels = {
        f"{keys}/{values} {name}": partial(compile_hopper_forward, Target(90, keys), values, **VARIANTS[name])
        for (keys, values), name in product(HEAD_DIMS, VARIANTS)
    }
    for (keys, values), name in product(HEAD_DIMS, VARIANTS):  # dq does not depend on sinks
        variant = {feature: given for feature, given in VARIANTS[name].items() if feature != "sinks"}
        kernels[f"dq {keys}/{values} {name}"] = partial(compile_hopper_queries, Target(90, keys), values, **variant)
    kernels["128/128 float16"] = partial(compile_hopper_forward, Target(90, 128, dtype="fp16", kv_dtype="fp16"), 128)
    print(json.dumps({name: asdict(kernels[name]()) for name in sys.argv[1:] or kernels}))


if __name__ == "__main__":
    main()
