"""The tests in vllm/ drive a real vLLM: they are collected only where one is installed (`make test-vllm`)."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("vllm") else ["vllm"]
