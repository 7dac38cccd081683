"""The CPU planner as plain Python, which a debugger can step through, plans the same bits."""

import os
import subprocess
import sys
from typing import Final

PLAN: Final = """
import numpy as np
from trunkattn.cpu.tuning import cpu_device
from trunkattn.planner.packs.cost import cost_model
from trunkattn.planner.planner import Planner, PlannerSpec, StepTables
from trunkattn.planner.splitting import split_rule

device = cpu_device(2)
model = cost_model(device, 8, 2, 128, 64, 4)
planner = Planner(PlannerSpec(4, "auto", model, split_rule(device, model, 2, 128, 0)))
lens = np.array([37, 41, 50, 9, 50], np.int32)
table = np.arange(5 * 13, dtype=np.int32).reshape(5, 13)
table[:, :4] = table[0, :4]
table[1:3, 4:7] = table[1, 4:7]
planned = planner.plan(StepTables(table, lens, np.array([0, 1, 3, 4, 5, 6], np.int32)))
print(planned.policy, [array.tolist() for array in vars(planned.work).values()])
"""


def printed(code: str, disable_jit: str) -> str:
    environment = os.environ | {"NUMBA_DISABLE_JIT": disable_jit}
    command = [sys.executable, "-W", "ignore::RuntimeWarning", "-c", code]  # the hash of pages is meant to overflow
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def test_plain_python_plans_the_same_bits() -> None:
    assert printed(PLAN, "1") == printed(PLAN, "0") != ""


CHAIN: Final = """
import numpy as np
from trunkattn.planner import prefix_forest

find, found = prefix_forest._find, []
prefix_forest._find = lambda *arguments: found.append(1) or find(*arguments)
rows = np.arange(200, dtype=np.int32)
table = np.where(rows < rows[:, None], rows, rows + 1000)
prefix_forest.build_forest(table, rows + 1, np.ones_like(rows), 1, 1)
print(len(found))
"""


def test_a_row_begins_where_it_leaves_the_row_before_it() -> None:
    """Each row of this chain shares one page more, and from the top it would take as many steps as it has pages."""
    assert int(printed(CHAIN, "1")) <= 4 * 200
