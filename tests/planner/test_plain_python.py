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


def planned(disable_jit: str) -> str:
    environment = os.environ | {"NUMBA_DISABLE_JIT": disable_jit}
    command = [sys.executable, "-W", "ignore::RuntimeWarning", "-c", PLAN]  # the hash of pages is meant to overflow
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def test_plain_python_plans_the_same_bits() -> None:
    assert planned("1") == planned("0") != ""
