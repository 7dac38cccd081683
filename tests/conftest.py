"""Hypothesis profiles: `ci` repeats the same examples in every run, `fuzz` looks for new ones (`make fuzz`)."""

import os
from importlib.util import find_spec

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
