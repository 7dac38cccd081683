"""SGLang's request table as a block table, without SGLang: on the host, and as a GPU makes it, interpreted."""

import os
import subprocess
import sys

import pytest
import torch

from trunkattn.config import Capacity
from trunkattn.gpu.attention import GpuBackend
from trunkattn.integrations.sglang.tables import Requests, pages
from trunkattn.planner.work_list import UNLIMITED
from trunkattn.reference import paged_attention

from ..gpu.backend_cases import CONFIG, pretend_gpu, run

CPU = torch.device("cpu")
ROWS, CONTEXT, PAGE, PAGES = 12, 100, 16, 60


@pytest.fixture(autouse=True)
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch)


def make_requests(lens: list[int], page: int, shared: int = 0, to_window: torch.Tensor | None = None) -> Requests:
    """Row r + 1 holds a request; row 0 is padding. shared: whole pages that all have in common."""
    table = torch.full((ROWS + 1, CONTEXT), PAGES * PAGE - 1, dtype=torch.int32)  # slots of earlier requests
    table[0] = 0
    free = iter(torch.randperm(PAGES * PAGE // page - 1 - shared, generator=torch.Generator().manual_seed(3)) + 1)
    for row, length in enumerate(lens):
        own = [int(next(free)) + shared for _ in range(-(-length // page) - shared)]
        first = torch.tensor([*range(1, shared + 1), *own]) * page
        table[row + 1, :length] = (first[:, None] + torch.arange(page)).flatten()[:length].to(torch.int32)
    return Requests(table, to_window, page)


@pytest.mark.parametrize("page", [1, 4, 16])
def test_slots_of_a_page_are_neighbours(page: int) -> None:
    lens = [33, 16, 17, 1]
    requests = make_requests(lens, page)
    table = requests.block_table(torch.tensor([1, 2, 3, 4]), max(lens))
    assert table.dtype == torch.int32 and table.shape == (4, -(-33 // page))
    for row, length in enumerate(lens):
        slots = [int(table[row, i // page]) * page + i % page for i in range(length)]
        assert slots == requests.req_to_token[row + 1, :length].tolist()


def test_the_window_pool_has_slots_of_its_own() -> None:
    moved = torch.zeros(PAGES * PAGE + PAGE, dtype=torch.int64)
    moved[3 * PAGE : 4 * PAGE] = torch.arange(PAGE) + 7 * PAGE
    requests = Requests(torch.arange(5 * PAGE, dtype=torch.int32)[None], moved, PAGE)
    assert requests.block_table(torch.tensor([0]), 5 * PAGE, in_window_pool=True).tolist() == [[0, 0, 0, 7, 0]]
    assert requests.block_table(torch.tensor([0]), 5 * PAGE).tolist() == [[0, 1, 2, 3, 4]]


def test_a_buffer_in_pages_is_no_copy() -> None:
    buffer = torch.randn(4 * PAGE + 3, 2, 8)
    found = pages(buffer, PAGE)
    assert found.shape == (4, PAGE, 2, 8) and found.data_ptr() == buffer.data_ptr()
    assert torch.equal(found[2, 5], buffer[2 * PAGE + 5])


@pytest.mark.slow
@pytest.mark.parametrize("page", [1, 3, 16])
@pytest.mark.parametrize("windows", [False, True])
def test_a_gpu_fills_the_same_table(page: int, windows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from trunkattn.integrations.sglang import device_tables

    monkeypatch.setattr(device_tables, "_COLUMNS", 8)  # so that a row takes several programs
    moved = torch.randint(0, PAGES, (PAGES * PAGE + PAGE,)) * page if windows else None
    tables, lens = None, [33, 16, 17, 1, 96]
    for _ in range(3):
        requests = make_requests(lens, page, to_window=moved)
        tables = tables or device_tables.DeviceTables(requests, ROWS)
        tables._requests.req_to_token.copy_(requests.req_to_token)
        rows, out = torch.tensor([2, 1, 5, 0]), torch.tensor([50, 60, 70])
        padded = torch.tensor([lens[1], lens[0], lens[4], 1])
        tables.fill(rows, padded, out, torch.tensor([9, 1, 16, 1]))
        assert tables.query_start_loc[:5].tolist() == [0, 9, 10, 26, 27]
        assert tables.seq_lens[:4].tolist() == padded.tolist()
        for pool, table in tables.tables.items():
            expected = requests.block_table(rows, max(lens), pool)
            for row, length in enumerate(padded.tolist()):
                used = -(-length // page)
                assert table[row, :used].tolist() == expected[row, :used].tolist()
        if moved is not None:
            assert tables.window_slots is not None
            assert tables.window_slots.tolist() == [*moved[out].tolist(), *[0] * (ROWS - 3)]
        lens = [each + 1 for each in lens]


COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from trunkattn.integrations.sglang.device_tables import _fill_kernel

POINTERS = dict.fromkeys(("req_to_token", "table", "window_table", "int32_lens"), "*i32")
POINTERS |= dict.fromkeys(("rows", "lens", "to_window"), "*i64")
KINDS = POINTERS | {"row_stride": "i32", "num_columns": "i32"}
signature = {name: KINDS.get(name, "constexpr") for name in _fill_kernel.arg_names}
for capability in (80, 90, 100):
    for page, window in ((1, False), (16, True), (48, True)):
        source = ASTSource(_fill_kernel, signature, {"PAGE_SIZE": page, "HAS_WINDOW": window, "COLUMNS": 1024})
        compile(source, target=GPUTarget("cuda", capability, 32))
"""


@pytest.mark.slow
def test_it_compiles_for_cards() -> None:
    """In a process without the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", COMPILE], env=environment, check=True, timeout=300)


@pytest.mark.slow
def test_padded_decode_steps_in_one_plan() -> None:
    """As a decode graph runs: tables and plan stay where they are, rows come and go, padding is row 0 of length 1."""
    from trunkattn.integrations.sglang.device_tables import DeviceTables

    torch.manual_seed(0)
    table = torch.zeros(ROWS + 1, CONTEXT, dtype=torch.int32)
    tables = DeviceTables(Requests(table, None, PAGE), ROWS)
    backend = GpuBackend(CONFIG, CPU, Capacity(ROWS, ROWS, -(-CONTEXT // PAGE), PAGES + 1, max_query_len=1))
    k_cache, v_cache = torch.randn(2, PAGES + 1, PAGE, 2, 32)
    step, places = None, set()
    for lens, rows in (([40, 57, 33], 4), ([70, 41, 58, 34, 96, 35, 36], 8), ([42], 1), ([50, 50], 8)):
        table.copy_(make_requests(lens, PAGE, shared=2).req_to_token)
        requests = torch.tensor([*range(1, len(lens) + 1), *[0] * (rows - len(lens))])
        tables.fill(requests, torch.tensor([*lens, *[1] * (rows - len(lens))]), None)
        step = backend.plan_on_device((tables.tables[False][:rows], tables.seq_lens[:rows], None), UNLIMITED, step)
        step.check()
        backend.check()
        places.add((step.gpu_plan.flat.data_ptr(), tables.tables[False].data_ptr(), tables.seq_lens.data_ptr()))
        q = torch.randn(rows, 4, 32)
        out, _ = run(backend, step, q, (k_cache, v_cache))
        want, _ = paged_attention(q, k_cache, v_cache, tables.tables[False][:rows], tables.seq_lens[:rows])
        torch.testing.assert_close(out.double(), want, rtol=0, atol=1e-5)
        assert step.counters.kv_tokens.tolist()[1] == sum(lens) + rows - len(lens), "a padded row counts one token"
    assert len(places) == 1
