"""The tables of a step on a GPU: one launch fills buffers that stay where they are."""

from typing import Final

import torch
import triton
import triton.language as tl

from trunkattn.integrations.sglang.tables import Requests

_COLUMNS: Final = 1024  # of a CTA


class DeviceTables:
    """Block table and lengths of up to `rows` requests, for graphs that read them at fixed places.

    Attributes:
        tables: [rows, pages of the longest request] int32, by whether it tells pages of the window pool.
        seq_lens: [rows] int32.
        query_start_loc: [rows + 1] int32, of prompts; see `BatchAttention.plan`.
        window_slots: [rows] int64: where a step's keys and values go in the window pool; None: there is none.
    """

    @torch.inference_mode(False)  # it is written to outside of it too
    def __init__(self, requests: Requests, rows: int) -> None:
        device = requests.req_to_token.device
        self._requests, self.rows = requests, rows
        pools = (False,) if requests.to_window is None else (False, True)
        shape = (rows, requests.max_pages)
        self.tables = {pool: torch.zeros(shape, dtype=torch.int32, device=device) for pool in pools}
        self.seq_lens = torch.zeros(rows, dtype=torch.int32, device=device)
        self.query_start_loc = torch.zeros(rows + 1, dtype=torch.int32, device=device)
        self.window_slots: torch.Tensor | None = None
        if requests.to_window is not None:
            self.window_slots = torch.zeros(rows, dtype=torch.int64, device=device)

    def fill(
        self,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        out_slots: torch.Tensor | None,
        query_lens: torch.Tensor | None = None,
    ) -> None:
        """Fills the first rows for a step, without a wait for the device.

        Args:
            rows: [requests] rows of the request table.
            seq_lens: [requests], this step's tokens included.
            out_slots: where keys and values go in the other pool; rows after them are padding, which goes to slot 0.
            query_lens: [requests]; None: one query token each, and query_start_loc stays as it is.
        """
        if query_lens is not None:
            torch.cumsum(query_lens, 0, dtype=torch.int32, out=self.query_start_loc[1 : len(rows) + 1])
        requests, count = self._requests, len(rows)
        to_window = requests.to_window
        table = self.tables[False]
        _fill_kernel[(count, triton.cdiv(table.shape[1], _COLUMNS))](
            *(requests.req_to_token, requests.req_to_token.stride(0), rows, seq_lens),
            *(table if to_window is None else to_window, table, self.tables.get(True, table), self.seq_lens),
            table.shape[1],
            PAGE_SIZE=requests.page_size,
            HAS_WINDOW=to_window is not None,
            COLUMNS=_COLUMNS,
        )
        if to_window is not None and self.window_slots is not None:
            self.window_slots.zero_()
            if out_slots is not None:
                self.window_slots[: len(out_slots)] = to_window[out_slots]


@triton.jit
def _fill_kernel(
    req_to_token,
    row_stride,
    rows,
    lens,
    to_window,
    table,
    window_table,
    int32_lens,
    num_columns,
    PAGE_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Program (request, block of columns); those after a request's last page have nothing to do."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = tl.load(lens + row).to(tl.int32)
    if block == 0:
        tl.store(int32_lens + row, length)
    columns = block * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < tl.minimum((length + PAGE_SIZE - 1) // PAGE_SIZE, num_columns)
    request = tl.load(rows + row).to(tl.int64)
    slots = tl.load(req_to_token + request * row_stride + columns * PAGE_SIZE, mask=inside, other=0)
    tl.store(table + row * num_columns + columns, slots // PAGE_SIZE, mask=inside)
    if HAS_WINDOW:
        moved = tl.load(to_window + slots, mask=inside, other=0)
        tl.store(window_table + row * num_columns + columns, (moved // PAGE_SIZE).to(tl.int32), mask=inside)
