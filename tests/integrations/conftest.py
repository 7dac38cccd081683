"""The tests in vllm/ and sglang/ drive a real engine: they are collected only where it is installed (`make test-vllm`,
`make test-sglang`). vLLM's packages for CPUs bring no Triton, which interpreted kernels need."""

from importlib.util import find_spec

collect_ignore = [engine for engine in ("vllm", "sglang") if not find_spec(engine)]
if not find_spec("triton"):
    collect_ignore.append("test_sglang_tables.py")
