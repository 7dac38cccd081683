"""The control of every comparison of tokens: attention whose partial results are merged wrongly."""

from typing import Any

import numpy as np
import pytest

from trunkattn.cpu import parallel as cpu


def break_merge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Partial results are averaged without their log-sum-exp, on a CPU."""
    execute = cpu.execute

    def without_weights(plan: Any, layer: Any, options: Any, workspace: Any) -> None:
        execute(plan, layer, options, workspace)
        out = layer.out.numpy()
        partial, indptr = workspace._arrays[2].reshape(-1, *out.shape[1:]), plan.work.merge_indptr
        for i, query in enumerate(plan.work.merge_queries):
            out[query] = np.mean(partial[indptr[i] : indptr[i + 1]], axis=0)

    monkeypatch.setattr(cpu, "execute", without_weights)
