"""Hypothesis profiles: `ci` repeats the same examples in every run, `fuzz` looks for new ones (`make fuzz`). Random
tensors are the same in every run, too."""

import os
from importlib.util import find_spec

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "ci", deadline=None, max_examples=100, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "fuzz", deadline=None, max_examples=100_000, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("ci")

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported; a GPU's tests need its compiler

if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton"):  # vLLM for CPUs comes without Triton
    from tests import fast_interpreter

    fast_interpreter.install()


@pytest.fixture(autouse=True)
def _same_random_tensors() -> None:
    """A test's numbers do not depend on the tests that its process has run before."""
    torch.manual_seed(7919)  # no test's own seed, whose tensors would be the same
