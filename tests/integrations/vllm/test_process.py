"""As a user runs it: the installed plug-in, found by its entry point, in the processes that vLLM starts."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from trunkattn.integrations.vllm import versions

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "vllm_offline.py"


def run_example(*arguments: str) -> tuple[list[str], str]:
    """(the answers, everything that was said)"""
    settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    small = ["--dtype", "float32", "--eager", "--max-tokens", "12", "--questions", "4", "--repeat", "8"]
    result = subprocess.run(
        [sys.executable, str(EXAMPLE), *arguments, *small, "--max-model-len", "2048"],
        capture_output=True,
        text=True,
        env=os.environ | settings,
        timeout=600,
    )
    said = result.stdout + result.stderr
    assert result.returncode == 0, said
    return [line for line in result.stdout.splitlines() if "?" in line], said


def test_the_entry_point_is_installed() -> None:
    (found,) = entry_points(group="vllm.general_plugins", name="trunkattn")
    assert found.value == "trunkattn.integrations.vllm:register"


def test_the_module_and_the_options_that_the_guide_names_for_a_server_on_a_cpu() -> None:
    (command,) = re.findall(r"^\$ python -m (vllm.*)$", (ROOT / "docs" / "guide" / "vllm.md").read_text(), re.MULTILINE)
    module, *arguments = command.split()
    assert find_spec(module)
    assert {option[2:].replace("-", "_") for option in arguments[::2]} <= EngineArgs.__dataclass_fields__.keys()


def test_the_example_in_separate_processes(model: Callable[[str], Path]) -> None:
    answers, said = run_example(str(model("llama")))
    assert "CUSTOM is used on this CPU" in said
    assert "TrunkAttention runs prefill chunks, decoding and mixed batches in 4 layers" in said
    assert len(answers) == 4
    assert "ours: " in said and "stock: " in said and "ms a token, 4 requests on one document" in said
    assert "4 of 4 answers are equal" in said


def test_the_example_with_vllms_own_attention_alone(model: Callable[[str], Path]) -> None:
    answers, said = run_example(str(model("llama")), "--only", "stock")
    assert "TrunkAttention" not in said
    assert len(answers) == 4


THREADS = """
import sys

def look(worker):
    import torch
    from trunkattn.cpu.threads import team

    attentions = [a for groups in worker.model_runner.attn_groups for group in groups
                  for a in group.get_metadata_builder().attentions.values()]
    return torch.get_num_threads(), len(team(torch.get_num_threads())), len(attentions)

if __name__ == "__main__":
    from vllm import LLM

    llm = LLM(sys.argv[1], dtype="float32", max_model_len=256, kv_cache_memory_bytes=1 << 24, enforce_eager=True,
              attention_backend="CUSTOM")
    llm.generate("three words here", use_tqdm=False)
    print("threads", *llm.collective_rpc(look))
"""


def test_threads_that_vllm_binds_to_cores(model: Callable[[str], Path], tmp_path: Path) -> None:
    """The back end is imported by a thread that may use one core, and computes on as many as torch all the same."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    script = tmp_path / "threads.py"
    script.write_text(THREADS)
    settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    settings["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | settings
    command = [sys.executable, str(script), str(model("llama"))]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert f"threads ({len(cores)}, {len(cores)}, 1)" in result.stdout, result.stdout + result.stderr


ENGINES = """
import sys
from vllm import LLM
from vllm.distributed import cleanup_dist_env_and_memory

for backend in ("CUSTOM", "CPU_ATTN"):
    llm = LLM(sys.argv[1], dtype="float32", max_model_len=256, kv_cache_memory_bytes=1 << 24, enforce_eager=True,
              block_size=32, attention_backend=backend)
    llm.generate("three words here", use_tqdm=False)
    print("answered", backend)
    del llm
    cleanup_dist_env_and_memory()
"""


def test_engines_one_after_another_in_one_process(model: Callable[[str], Path], tmp_path: Path) -> None:
    """Ours imports Numba, and a stock one starts all the same."""
    script = tmp_path / "engines.py"
    script.write_text(ENGINES)
    command = [sys.executable, str(script), str(model("llama"))]
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert result.stdout.split("\n")[-3:-1] == ["answered CUSTOM", "answered CPU_ATTN"], result.stdout + result.stderr


LATENT = """
import sys

if __name__ == "__main__":
    from vllm import LLM

    LLM(sys.argv[1], dtype="float32", max_model_len=256, kv_cache_memory_bytes=1 << 24, enforce_eager=True,
        attention_backend="TRUNK_MLA", skip_tokenizer_init=True)
"""


@pytest.mark.skipif(not hasattr(AttentionBackendEnum, "register"), reason="this vLLM has no room for further names")
def test_the_name_of_latent_attention_reaches_workers(model: Callable[[str], Path], tmp_path: Path) -> None:
    """They read it from the configuration, before they load plug-ins. On a CPU they refuse it."""
    script = tmp_path / "latent.py"
    script.write_text(LATENT)
    command = [sys.executable, str(script), str(model("deepseek_v3"))]
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert result.returncode != 0
    assert versions.NO_LATENT_ON_CPU in result.stdout + result.stderr
