"""Run by test_torch_features: two processes train one layer over a tree each, by DDP and by FSDP2, on a CPU.

Prints for both whether the gradients are the mean of what each tree gives alone.
"""

import socket
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from trunkattn import PrefixTree, flash_attention

TREES = (
    PrefixTree.from_segments([-1, 0, 0], [5, 3, 2], tokens=range(10)),
    PrefixTree.from_segments([-1, 0, 1, 0], [2, 4, 1, 3], tokens=range(10)),
)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv = nn.Embedding(16, 16), nn.Linear(16, 4 * 8)
        self.sinks = nn.Parameter(torch.zeros(2))

    def forward(self, tree: PrefixTree) -> torch.Tensor:
        q, k, v = self.qkv(self.embed(tree.tokens)).view(-1, 4, 8).split([2, 1, 1], 1)
        out = flash_attention(q, k, v, tree=tree, sinks=self.sinks)
        assert isinstance(out, torch.Tensor)
        return out.square().sum()


def gradients(model: nn.Module) -> list[torch.Tensor]:
    found: list[Any] = [parameter.grad for parameter in model.parameters()]
    return [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in found]


def work(rank: int, port: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    expected = []
    for tree in TREES:
        torch.manual_seed(0)
        layer = Layer()
        layer(tree).backward()
        expected.append(gradients(layer))
    for name in ("ddp", "fsdp2"):
        torch.manual_seed(0)
        model: Any = Layer()
        model = (
            DistributedDataParallel(model) if name == "ddp" else fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        )
        model(TREES[rank]).backward()
        equal = all(
            torch.allclose(found, (a + b) / 2, rtol=1e-5, atol=1e-6)
            for found, a, b in zip(gradients(model), *expected, strict=True)
        )
        if rank == 0:
            print(name, "equal" if equal else "different", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number = free.getsockname()[1]
    mp.spawn(work, (number,), nprocs=2)
    sys.exit(0)
