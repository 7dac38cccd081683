"""SGLang's request table and caches on the card, without SGLang."""

import torch

from trunkattn.integrations.sglang.tables import Requests, pages

ROWS, CONTEXT, SLOTS, HEADS, KV_HEADS, DIM = 16, 700, 9600, 8, 2, 128


def place(table: torch.Tensor, lens: list[int], page: int, shared: int) -> None:
    """Writes the slots of requests, the first pages of which are the same."""
    free = (torch.randperm(SLOTS // page - 1 - shared) + 1 + shared).tolist()
    for row, length in enumerate(lens):
        own = [free.pop() for _ in range(-(-length // page) - shared)]
        first = torch.tensor([*range(1, shared + 1), *own]) * page
        table[row + 1, :length] = (first[:, None] + torch.arange(page)).flatten()[:length].to(torch.int32).cuda()


def setting(page: int) -> tuple[Requests, tuple[torch.Tensor, torch.Tensor]]:
    """An empty request table, and caches of any numbers."""
    torch.manual_seed(0)
    request_table = torch.zeros(ROWS + 1, CONTEXT, dtype=torch.int32, device="cuda")
    k, v = torch.randn(2, SLOTS, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    return Requests(request_table, None, page), (pages(k, page), pages(v, page))


def padding(lens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows of the request table, lengths) of all rows of a graph."""
    spare = ROWS - len(lens)
    rows, padded = [*range(1, len(lens) + 1), *[0] * spare], [*lens, *[1] * spare]
    return torch.tensor(rows, device="cuda"), torch.tensor(padded, device="cuda")
