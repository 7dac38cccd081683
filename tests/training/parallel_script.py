"""Two processes train one layer over a tree each, by DDP and by FSDP2. Argument: "cpu", or "cuda" for a GPU each.

Prints for both whether the gradients are the mean of what each tree gives alone. Run by test_torch_features, and by the
test of two GPUs.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from trunkattn import PrefixTree, flash_attention

TREES = (
    PrefixTree.from_segments([-1, 0, 0], [5, 3, 2], tokens=range(10)),
    PrefixTree.from_segments([-1, 0, 1, 0], [2, 4, 1, 3], tokens=range(10)),
)
COLLECTIVES = {"cpu": "gloo", "cuda": "nccl"}
# A process that is forked has what this one has imported, which takes most of the time. CUDA does not outlive a fork.
STARTS = {"cpu": "fork", "cuda": "spawn"}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv = nn.Embedding(16, 16), nn.Linear(16, 4 * 8)
        self.sinks = nn.Parameter(torch.zeros(2))

    def forward(self, tree: PrefixTree) -> torch.Tensor:
        q, k, v = self.qkv(self.embed(tree.tokens.to(self.sinks.device))).view(-1, 4, 8).split([2, 1, 1], 1)
        out = flash_attention(q, k, v, tree=tree, sinks=self.sinks)
        assert isinstance(out, torch.Tensor)
        return out.square().sum()


def gradients(model: nn.Module) -> list[torch.Tensor]:
    found: list[Any] = [parameter.grad for parameter in model.parameters()]
    return [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in found]


def work(rank: int, meeting: str, device: str) -> None:
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(COLLECTIVES[device], init_method=f"file://{meeting}", rank=rank, world_size=2)
    expected = []
    for tree in TREES:
        torch.manual_seed(0)
        layer = Layer().to(device)
        layer(tree).backward()
        expected.append(gradients(layer))
    for name in ("ddp", "fsdp2"):
        torch.manual_seed(0)
        model: Any = Layer().to(device)
        if name == "ddp":
            model = DistributedDataParallel(model)
        else:
            policy = MixedPrecisionPolicy(param_dtype=torch.float32)  # for which FSDP looks into arguments
            model = fully_shard(model, mesh=init_device_mesh(device, (2,)), mp_policy=policy)
        model(TREES[rank]).backward()
        equal = all(
            torch.allclose(found, (a + b) / 2, rtol=1e-5, atol=1e-6)
            for found, a, b in zip(gradients(model), *expected, strict=True)
        )
        if rank == 0:
            print(name, "equal" if equal else "different", flush=True)
    dist.destroy_process_group()


def in_processes_of_its_own(device: str) -> list[str]:
    """What the script prints, in words."""
    root = Path(__file__).parents[2]
    paths = os.pathsep.join([str(root / "src"), str(root)])
    done = subprocess.run(
        [sys.executable, __file__, device], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": paths}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.split()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(work, (f"{folder}/meeting", sys.argv[1]), nprocs=2, start_method=STARTS[sys.argv[1]])
