"""The interpreter with repeated work taken out gives the values of the one that Triton brings."""

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
import torch, triton
import triton.language as tl

if sys.argv[1] == "fast":
    import fast_interpreter
    fast_interpreter.install()

@triton.jit
def order(a, x, b, y):  # associative, not commutative, of two tensors
    return a * b, x * b + y

@triton.jit
def later(a, b):
    return tl.where(b > 0, b, a)

@triton.jit
def nested(values, AXIS: tl.constexpr):
    return tl.max(values, AXIS), tl.sum(values, AXIS)

@triton.jit
def kernel(x, out, M: tl.constexpr, N: tl.constexpr):
    m, n = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    values = tl.load(x + m * N + n)
    a, b = tl.reduce((values, values + 1), 1, order)
    tl.store(out + tl.arange(0, M), a)
    tl.store(out + M + tl.arange(0, M), b)
    a, b = tl.associative_scan((values, values - 1), 0, order)
    tl.store(out + 100 + m * N + n, a)
    tl.store(out + 200 + m * N + n, b)
    tl.store(out + 300 + m * N + n, tl.associative_scan(values, 1, later, reverse=True))
    tl.store(out + 400, tl.reduce(tl.ravel(values), 0, later))
    tl.store(out + 401, tl.reduce(values, None, later))
    tl.store(out + 410 + m, tl.reduce(values, 1, later, keep_dims=True))
    most, total = nested(values, 0)
    tl.store(out + 420 + tl.arange(0, N), most)
    tl.store(out + 430 + tl.arange(0, N), total)
    tl.store(out + 440 + tl.arange(0, N), tl.cumsum(total, 0))

@triton.jit
def calculate(x, out, OPERATION: tl.constexpr):  # rows of x with its column, of another shape and dtype
    row, column = tl.load(x + tl.arange(0, 2)), tl.load(x + tl.arange(0, 2)).to(tl.int32)[:, None]
    if OPERATION == "add":
        found = row + column
    elif OPERATION == "sub":
        found = row - column
    else:
        found = row * column
    tl.static_assert(found.shape[0] == 2 and found.numel == 4 and found.dtype == row.dtype)
    tl.store(out + tl.arange(0, 2)[:, None] * 2 + tl.arange(0, 2)[None, :], found)

most, least = 2**31 - 1, -2**31
pairs = ((most, 0), (most, 1), (least + 1, 1), (least, 1), (46341, 46340), (2, 46340))
for operation in ("add", "sub", "mul"):
    for pair in pairs:
        for dtype in (torch.int32, torch.uint32, torch.int64):
            out = torch.zeros(4, dtype=torch.int64)
            x = torch.tensor([each % 2**32 if dtype == torch.uint32 else each for each in pair]).to(dtype)
            calculate[(1,)](x, out, operation)
            print(operation, pair, dtype, out.tolist())

for dtype in (torch.int32, torch.float32, torch.float16):
    torch.manual_seed(0)
    x = torch.randint(-3, 4, (4, 8), dtype=torch.int32).to(dtype)
    out = torch.zeros(450, dtype=dtype)
    kernel[(1,)](x, out, 4, 8)
    print(out.tolist())
"""


def run(folder: Path, kind: str) -> str:
    program = folder / "program.py"
    program.write_text(PROGRAM)
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run([sys.executable, str(program), kind], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_values_are_those_of_the_interpreter_as_it_comes(tmp_path: Path) -> None:
    plain = run(tmp_path, "plain")
    assert len(plain.splitlines()) == 3 + 3 * 6 * 3
    assert "add (2147483647, 1) torch.int32 [-2, -2147483648, -2147483648, 2]" in plain, "sums wrap without a word"
    assert run(tmp_path, "fast") == plain
