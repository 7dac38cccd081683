"""Run by test_latent_compile in a process of its own, in which Triton compiles.

Prints JSON: kernel -> registers, spilled bytes, shared bytes, and the named barriers that the compiler takes.
"""

import json
from dataclasses import asdict

from benchmarks.kernels.compile_ahead import (
    Target,
    compile_hopper_latent,
    compile_merge,
    compile_portable_latent,
)
from trunkattn.gpu.mla.spec import portable_tile


def main() -> None:
    of_heads = {"num_qo_heads": 16, "num_kv_heads": 1}
    report = {}
    for capability in (80, 90, 100):
        target = Target(capability, **of_heads)
        for rows in (16, 32, 64):
            tile = portable_tile(rows, 32)
            report[f"sm{capability} portable {rows}"] = compile_portable_latent(target, tile, masked=True)
        single = Target(capability, **of_heads, dtype="fp32", kv_dtype="fp32")
        report[f"sm{capability} portable float32"] = compile_portable_latent(single, portable_tile(16, 16))
        report[f"sm{capability} merge"] = compile_merge(Target(capability, 512, **of_heads))
    for dtype in ("bf16", "fp16"):
        target = Target(90, **of_heads, dtype=dtype, kv_dtype=dtype)
        report[f"hopper {dtype}"] = compile_hopper_latent(target)
    report["hopper masked"] = compile_hopper_latent(Target(90, **of_heads), masked=True)
    report["hopper pages of 16 masked"] = compile_hopper_latent(Target(90, **of_heads), masked=True, page_size=16)
    print(json.dumps({name: asdict(used) for name, used in report.items()}))


if __name__ == "__main__":
    main()
