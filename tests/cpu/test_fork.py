"""A forked child of a process that has computed gets the same bits (multiprocessing, a pre-forking server)."""

import subprocess
import sys
from typing import Final

import pytest

pytestmark = pytest.mark.slow

LIBRARY: Final = """
import os, torch, trunkattn
attention = trunkattn.BatchAttention(trunkattn.AttentionConfig(4, 2, 16, 4, torch.float32), "cpu")
table = torch.tensor([[0, 1], [0, 2]], dtype=torch.int32)
plan = attention.plan(table, torch.tensor([7, 8], dtype=torch.int32))
q, k, v = torch.randn(2, 4, 16), torch.randn(3, 4, 2, 16), torch.randn(3, 4, 2, 16)
expected = attention.run(plan, q, k, v)
child = os.fork()
if child == 0:
    again = attention.run(attention.plan(table, torch.tensor([7, 8], dtype=torch.int32)), q, k, v)
    os._exit(0 if torch.equal(again, expected) else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""

ENGINE: Final = """
import os, sys, torch
from transformers import AutoModelForCausalLM, LlamaConfig
from trunkattn import LLM, SamplingParams
sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
AutoModelForCausalLM.from_config(LlamaConfig(**sizes)).save_pretrained(sys.argv[1])
llm = LLM(sys.argv[1], num_pages=16)
answer = lambda: llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=4))[0].outputs[0].token_ids
expected = answer()
child = os.fork()
if child == 0:
    os._exit(0 if answer() == expected else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def run(code: str, *arguments: str) -> int:
    return subprocess.run([sys.executable, "-c", code, *arguments], timeout=600, check=False).returncode


def test_the_library_in_a_forked_child() -> None:
    assert run(LIBRARY) == 0


def test_the_engine_in_a_forked_child(tmp_path: object) -> None:
    assert run(ENGINE, str(tmp_path)) == 0
