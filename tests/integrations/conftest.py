"""The tests in vllm/ and sglang/ drive a real engine: they are collected only where it is installed (`make test-vllm`,
`make test-sglang`)."""

from importlib.util import find_spec

collect_ignore = [engine for engine in ("vllm", "sglang") if not find_spec(engine)]
