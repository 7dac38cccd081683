"""Run by test_latent_compile in a process of its own, in which Triton compiles. Arguments: names of kernels (all, if
there are none).

Prints JSON: kernel -> registers, spilled bytes, shared bytes, and the named barriers that the compiler takes.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial

from benchmarks.kernels.compile_kernels import (
    compile_hopper_latent,
    compile_merge,
    compile_portable_latent,
)
from benchmarks.kernels.cross_compile import Target
from benchmarks.kernels.tile_solver import Resources
from trunkattn.gpu.mla.spec import portable_tile


def main() -> None:
    of_heads = {"num_qo_heads": 16, "num_kv_heads": 1}
    kernels: dict[str, Callable[[], Resources]] = {}
    for capability in (80, 90, 100):
        target = Target(capability, **of_heads)
        for rows in (16, 32, 64):
            tile = portable_tile(rows, 32)
            kernels[f"sm{capability} portable {rows}"] = partial(compile_portable_latent, target, tile, masked=True)
        single = Target(capability, **of_heads, dtype="fp32", kv_dtype="fp32")
        kernels[f"sm{capability} portable float32"] = partial(compile_portable_latent, single, portable_tile(16, 16))
        kernels[f"sm{capability} merge"] = partial(compile_merge, Target(capability, 512, **of_heads))
    for dtype in ("bf16", "fp16"):
        target = Target(90, **of_heads, dtype=dtype, kv_dtype=dtype)
        kernels[f"hopper {dtype}"] = partial(compile_hopper_latent, target)
        narrow = Target(90, **of_heads, dtype=dtype, kv_dtype="fp8e4nv")
        kernels[f"hopper fp8 {dtype}"] = partial(compile_hopper_latent, narrow)
        kernels[f"hopper fp8 {dtype} masked"] = partial(compile_hopper_latent, narrow, masked=True, page_size=16)
    kernels["hopper masked"] = partial(compile_hopper_latent, Target(90, **of_heads), masked=True)
    kernels["hopper groups of 12"] = partial(compile_hopper_latent, Target(90, num_qo_heads=12, num_kv_heads=1))
    kernels["hopper pages of 16 masked"] = partial(
        compile_hopper_latent, Target(90, **of_heads), masked=True, page_size=16
    )
    print(json.dumps({name: asdict(kernels[name]()) for name in sys.argv[1:] or kernels}))


if __name__ == "__main__":
    main()
