"""What benchmarks look at inside the library: these are no part of its interface."""

from typing import Any

from trunkattn import BatchAttention, Plan


def backend_of(attention: BatchAttention) -> Any:
    """What plans and runs, a `GpuBackend` or a `CpuBackend`."""
    return attention._backend


def step_of(plan: Plan) -> Any:
    """What was planned, a `GpuStep`, a `DeviceStep` or a `CpuStep`."""
    return plan.step
