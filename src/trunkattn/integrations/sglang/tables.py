"""Makes block tables from SGLang's request table.

SGLang keeps the slot of every token of a request: a row of `req_to_token`. The slots of a page are neighbours, and a
request fills its pages in order, so every page_size-th slot tells a page. The layers with a window may have a pool of
their own: another table tells the slot there for each slot.
"""

from typing import Any, NamedTuple

import torch


class Requests(NamedTuple):
    """Where requests' tokens are.

    Attributes:
        req_to_token: [requests, tokens] int32: slot of each token.
        to_window: [slots] int64: the slot in the window pool for each slot; None: there is no such pool.
        page_size: tokens of a page.
    """

    req_to_token: torch.Tensor
    to_window: torch.Tensor | None
    page_size: int

    @property
    def max_pages(self) -> int:
        """Pages of the longest request that there is room for."""
        return -(-self.req_to_token.shape[1] // self.page_size)

    def block_table(self, rows: torch.Tensor, longest: int, in_window_pool: bool = False) -> torch.Tensor:
        """[len(rows), pages of `longest` tokens] int32, on the device of the request table.

        Args:
            rows: [requests of a step] rows of `req_to_token`.
            longest: tokens of the longest of them.
            in_window_pool: pages of the window pool. Those that have left every window are page 0 there.
        """
        slots = self.req_to_token[rows, : longest : self.page_size]
        if in_window_pool:
            assert self.to_window is not None
            slots = self.to_window[slots.long()]
        return (slots // self.page_size).to(torch.int32)


def requests_of(runner: Any) -> Requests:
    """The tables of a model runner."""
    pool = runner.token_to_kv_pool
    mapping = getattr(pool, "full_to_swa_index_mapping", None)
    return Requests(runner.req_to_token_pool.req_to_token, mapping, runner.page_size)


def pages(buffer: torch.Tensor, page_size: int) -> torch.Tensor:
    """A layer's keys or values [slots, heads, width] as [pages, page_size, heads, width], without a copy."""
    whole = buffer.shape[0] // page_size
    return buffer[: whole * page_size].view(whole, page_size, *buffer.shape[1:])
