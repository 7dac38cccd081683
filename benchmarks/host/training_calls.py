"""What an eager `flash_attention` takes the host, with its gradients: rows of `host_time`.

Each call finds the device idle and is not waited for. `forward_us`: a call that keeps what the backward pass needs;
`both_us`: the call and its gradients. `*_launches`, `*_compiled`: kernels of Triton that are launched by a call, and
compiled by the first, known in a fake process only.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, Final

import torch

from trunkattn import PrefixTree, flash_attention

HEADS: Final = (32, 8)
FAKE_HEADS: Final = (2, 1)  # a CPU fills and adds tensors meanwhile, so few and short ones
TOKENS, FAKE_TOKENS = 1024, 64
CASES: Final = ("batch", "batch with a window", "packed", "tree", "everything in a tree")


class FakeDriver:
    """Stands in for Triton's driver and compiler: kernels are asked for as ever, compiled to nothing, and not launched.

    Attributes:
        launches, compiled: how many there were.
    """

    def __init__(self) -> None:
        self.launches = self.compiled = 0

    def install(self) -> None:
        """Lets Triton launch and compile here, for an H100."""
        from triton.backends.compiler import GPUTarget
        from triton.runtime import driver
        from triton.runtime.jit import JITFunction

        def compile_nothing(kernel: Any, key: Any, signature: Any, device: int, *options: Any) -> "_Compiled":
            self.compiled += 1
            kernel.device_caches[device][0][key] = made = _Compiled(self)
            return made

        driver.set_active(
            SimpleNamespace(
                get_current_target=lambda: GPUTarget("cuda", 90, 32),
                get_current_device=lambda: 0,
                get_current_stream=lambda device: 0,
            )
        )
        JITFunction._do_compile = compile_nothing


class _Compiled:
    """A compiled kernel as Triton calls it, which counts its launches."""

    function, packed_metadata = 0, ()

    def __init__(self, driver: FakeDriver) -> None:
        self._driver = driver

    def launch_metadata(self, grid: tuple[int, ...], stream: int, *arguments: Any) -> Any:
        """Returns nothing, as nobody listens."""
        return None

    def run(self, *arguments: Any) -> None:
        """Counts a launch."""
        self._driver.launches += 1

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any) -> None:
            self.run(*grid, self.launch_metadata(grid, 0, *arguments), *arguments)

        return launch


def fake_training() -> FakeDriver:
    """Lets this process train on the CPU as on a GPU that it does not have. Kernels compute nothing."""
    made = FakeDriver()
    made.install()
    torch.cuda.is_available = lambda: True
    torch.cuda.device = lambda device: nullcontext()  # type: ignore[assignment, misc, return-value]
    torch.Tensor.is_cuda = True  # type: ignore[assignment]
    from trunkattn.training import op

    if hasattr(op, "_forward_gpu"):  # else an earlier checkout, whose ops ask a tensor where it is
        ops = torch.library.Library("trunkattn", "IMPL")
        for name, function in (("flash_attention", op._forward_gpu), ("flash_attention_backward", op._backward_gpu)):
            ops.impl(name, function, "CPU", allow_override=True)
        made.ops = ops  # type: ignore[attr-defined]  # they last as long as it does
    return made


def options_of(name: str, tokens: int, device: str) -> dict[str, Any]:
    """The arguments of a case besides the tensors."""
    if name == "packed":
        sums = torch.tensor([0, tokens // 4, tokens], dtype=torch.int32, device=device)
        return {"causal": True, "cu_seqlens_q": sums, "cu_seqlens_k": sums}
    features: dict[str, Any] = {"sliding_window": tokens // 4}
    if "tree" in name:
        tree = PrefixTree.from_segments([-1, 0, 0], [tokens // 2, tokens // 4, tokens // 4])
        more = features | {"logits_soft_cap": 30.0} if "everything" in name else {}
        return {"tree": tree, **more}
    return {"causal": True, **(features if "window" in name else {})}


def calls_of(name: str, device: str, tokens: int, heads: Sequence[int]) -> dict[str, Callable[[], object]]:
    """Both calls of a case."""
    lead = (1, tokens) if name.startswith("batch") else (tokens,)
    leaves = [
        torch.zeros(*lead, heads[index], 128, dtype=torch.bfloat16, device=device, requires_grad=True)
        for index in (0, 1, 1)
    ]
    options, dout = options_of(name, tokens, device), torch.zeros(*lead, heads[0], 128, device=device).bfloat16()

    def forward() -> torch.Tensor:
        out = flash_attention(leaves[0], leaves[1], leaves[2], **options)
        assert isinstance(out, torch.Tensor)
        return out

    return {"forward": forward, "both": lambda: torch.autograd.grad(forward(), leaves, dout)}


def training_rows(
    timed: Callable[[Callable[[], object], int, Callable[[], object]], dict[str, float]],
    calls: int,
    settle: Callable[[], object],
    fake: FakeDriver | None,
) -> list[dict[str, Any]]:
    """A row for each case. timed: `host_us`. fake: from `fake_training`, None on a GPU."""
    device, tokens, heads = ("cuda", TOKENS, HEADS) if fake is None else ("cpu", FAKE_TOKENS, FAKE_HEADS)
    rows = []
    for name in CASES:
        row: dict[str, Any] = {"attention": name, "tokens": tokens}
        for what, call in calls_of(name, device, tokens, heads).items():
            before = fake.compiled if fake else 0
            call()
            if fake:
                row[f"{what}_compiled"], fake.launches = fake.compiled - before, 0
                call()
                row[f"{what}_launches"] = fake.launches
            row |= {f"{what}_{key}": value for key, value in timed(call, calls, settle).items()}
        rows.append(row)
    return rows
