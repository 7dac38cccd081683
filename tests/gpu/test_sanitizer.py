"""How `make test-gpu` runs the checkers, and what it reads from the race checker's report."""

import ast
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ..on_gpu import sanitizer

HEAD = "========= COMPUTE-SANITIZER\n"
# as it was printed on a card, between pytest's dots
PRINTED = """.========= Error: Potential RAW hazard detected at __shared__ 0x433 in block (77,0,0) :
=========     Write Thread (31,0,0) at warp_specialized_kernel+0x5d0 in test_warp_specialization.py:{written}
.=========     Read Thread (160,0,0) at warp_specialized_kernel+0x1a0 in test_warp_specialization.py:{read}
=========     Current Value : 2
=========     Saved host backtrace up to driver entry point at kernel launch time
=========
"""


def report(*hazards: sanitizer.Hazard) -> str:
    lines = [HEAD]
    for kind, *accesses in hazards:
        lines.append(f"========= Error: {kind} hazard detected at __shared__ 0x14140 in block (18,0,0) :\n")
        for what, thread, kernel, file, line in accesses:
            lines.append(f"=========     {what} Thread ({thread},0,0) at {kernel}+0x4240 in {file}:{line}\n")
        lines.append("=========     Current Value : 2\n========= \n")
    return "".join(lines) + summary(len(hazards))


def summary(count: int) -> str:
    return f"========= RACECHECK SUMMARY: {count} hazards displayed ({count} errors, 0 warnings)\n"


def line_of(path: str, text: str) -> int:
    """path: from the project's root."""
    for number, line in enumerate((sanitizer.ROOT / path).read_text().splitlines(), 1):
        if line.strip().startswith(text):
            return number
    raise LookupError(f"no line of {path} begins with {text!r}")


def hand_over(kernel: str, path: str) -> sanitizer.Hazard:
    """The hazard of a kernel that the checker names by the last part of its path."""
    place = (kernel, Path(path).name, line_of(path, f"def {kernel}("))
    return sanitizer.Hazard(
        "Potential RAW", sanitizer.Access("Write", 95, *place), sanitizer.Access("Read", 192, *place)
    )


CUDA_FILE = "tests/on_gpu/race_controls.cu"
CONTROL_FILE, DECODE_FILE = "tests/on_gpu/test_warp_specialization.py", "src/trunkattn/gpu/hopper/decode.py"
CONTROL, KERNEL = (
    hand_over("warp_specialized_kernel", CONTROL_FILE),
    hand_over("hopper_decode_kernel", DECODE_FILE),
)


def exchange(kernel: str, write: tuple[str, str], read: tuple[str, str]) -> sanitizer.Hazard:
    """A hazard between two lines, each given by its file and what it begins with."""
    accesses = [
        sanitizer.Access(what, 0, kernel, Path(path).name, line_of(path, text))
        for what, (path, text) in (("Write", write), ("Read", read))
    ]
    return sanitizer.Hazard("Potential RAW", *accesses)


CONTROLS = {
    sanitizer.HAND_OVER: CONTROL,
    sanitizer.NAMED: exchange("named_barrier_kernel", (CUDA_FILE, "values[thread] ="), (CUDA_FILE, "out[thread] =")),
    sanitizer.MBARRIER: exchange("mbarrier_kernel", (CUDA_FILE, "values[thread] ="), (CUDA_FILE, "out[thread] =")),
}


def warp_specialized() -> list[tuple[str, str]]:
    """Every kernel of the project that hands over to partitions, and its file."""
    found = []
    for path in sorted((sanitizer.ROOT / "src/trunkattn").rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and "gl.warp_specialize(" in ast.unparse(node):
                found.append((node.name, str(path.relative_to(sanitizer.ROOT))))
    return found


@pytest.mark.parametrize(("kernel", "path"), warp_specialized())
def test_the_hand_over_of_every_kernel_is_known(kernel: str, path: str) -> None:
    lines, clean = sanitizer.verdict(Counter([CONTROL, hand_over(kernel, path)]))
    assert clean, lines


def test_kernels_of_all_folders_are_among_them() -> None:
    assert {kernel for kernel, _ in warp_specialized()} >= {
        "hopper_decode_kernel",
        "latent_decode_kernel",
        "hopper_forward_kernel",
        "hopper_backward_kernel",
    }


def test_a_hand_over_is_set_aside_if_the_control_is_reported_too() -> None:
    end = KERNEL.first._replace(line=line_of(DECODE_FILE, "gl.warp_specialize("))
    lines, clean = sanitizer.verdict(sanitizer.hazards_in(report(KERNEL, CONTROL, KERNEL, KERNEL._replace(first=end))))
    assert clean
    assert [line.split(" x ")[0] for line in lines] == ["2", "1", "1"]
    lines, clean = sanitizer.verdict(sanitizer.hazards_in(report(KERNEL)))
    assert not clean
    assert "a race" in lines[0]


BACKWARD, KEY_LOADS = (f"src/trunkattn/training/hopper/{name}.py" for name in ("backward", "key_loads"))
BEHIND_INIT = exchange(
    "hopper_backward_kernel", (KEY_LOADS, "mbarrier.init(dout_full"), (BACKWARD, "def hopper_backward_kernel(")
)
BEHIND_INIT = BEHIND_INIT._replace(second=BEHIND_INIT.second._replace(thread=128))


def test_a_hand_over_can_have_the_line_of_the_init_ahead_of_it() -> None:
    lines, clean = sanitizer.verdict(Counter([CONTROL, BEHIND_INIT]))
    assert clean and any("key_loads.py" in line and line.endswith(sanitizer.HAND_OVER) for line in lines)


@pytest.mark.parametrize(
    "hazard",
    [
        BEHIND_INIT._replace(first=BEHIND_INIT.first._replace(line=BEHIND_INIT.first.line + 1)),
        BEHIND_INIT._replace(first=BEHIND_INIT.first._replace(thread=128)),
        BEHIND_INIT._replace(first=BEHIND_INIT.first._replace(file="not_ours.py")),
        BEHIND_INIT._replace(second=BEHIND_INIT.second._replace(line=BEHIND_INIT.second.line + 1)),
        BEHIND_INIT._replace(kind="Potential WAR"),
    ],
)
def test_another_access_behind_an_init_is_a_race(hazard: sanitizer.Hazard) -> None:
    assert not sanitizer.verdict(Counter([CONTROL, hazard]))[1]


def test_a_report_as_it_was_printed() -> None:
    line = line_of(CONTROL_FILE, "def warp_specialized_kernel(")
    printed = HEAD + PRINTED.format(written=line, read=line) + PRINTED.format(written=line, read=line) + summary(2)
    ((hazard, count),) = sanitizer.hazards_in(printed).items()
    assert count == 2
    assert hazard.first == ("Write", 31, "warp_specialized_kernel", "test_warp_specialization.py", line)
    assert hazard.second == ("Read", 160, "warp_specialized_kernel", "test_warp_specialization.py", line)
    assert hazard.order == sanitizer.HAND_OVER


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "Potential WAR"},
        {"first": {"what": "Read"}},
        {"second": {"what": "Write"}},
        {"first": {"line": 1}},
        {"first": {"line": KERNEL.first.line + 1}},
        {"second": {"line": KERNEL.second.line + 1}},
        {"second": {"line": line_of(DECODE_FILE, "gl.warp_specialize(")}},
        {"second": {"file": "common.py"}},
        {"first": {"thread": 128}},
        {"second": {"thread": 127}},
        {"first": {"kernel": "warp_specialized_kernel"}},
    ],
)
def test_anything_else_is_a_race(changes: dict[str, Any]) -> None:
    parts = {
        name: getattr(KERNEL, name)._replace(**change) if isinstance(change, dict) else change
        for name, change in changes.items()
    }
    hazards = sanitizer.hazards_in(report(CONTROL, KERNEL._replace(**parts)))
    assert not sanitizer.verdict(hazards)[1]


PAIRS, ROWS = "src/trunkattn/gpu/mla/pairs.py", "src/trunkattn/gpu/mla/rows.py"
PRODUCER, TILES = "src/trunkattn/training/hopper/producer.py", "src/trunkattn/training/hopper/query_tiles.py"
MAXIMA = exchange("latent_decode_kernel", (PAIRS, "shared.max_left.store"), (PAIRS, "first_max = shared.max_left"))


@pytest.mark.parametrize(
    ("kernel", "write", "read", "order"),
    [
        ("latent_decode_kernel", (PAIRS, "shared.max_left"), (PAIRS, "first_max = shared.max_left"), sanitizer.NAMED),
        ("latent_decode_kernel", (ROWS, "shared.q_rope"), (ROWS, "return shared.q_rope"), sanitizer.NAMED),
        ("latent_decode_kernel", (ROWS, "shared.max_left"), (ROWS, "largest = gl.maximum(shared"), sanitizer.NAMED),
        ("latent_decode_kernel", (ROWS, "shared.sum_left"), (ROWS, "row_sum = shared.sum_left"), sanitizer.NAMED),
        ("hopper_forward_kernel", (PRODUCER, "memory.info.index(i).store"), (TILES, "fields += ("), sanitizer.MBARRIER),
    ],
)
def test_what_a_barrier_orders_is_set_aside_if_the_control_is_reported_too(
    kernel: str, write: tuple[str, str], read: tuple[str, str], order: str
) -> None:
    hazard = exchange(kernel, write, read)
    lines, clean = sanitizer.verdict(Counter([hazard, *CONTROLS.values()]))
    assert clean and len(lines) == 4
    assert any(kernel in line and line.endswith(order) for line in lines)
    lines, clean = sanitizer.verdict(Counter([hazard, *(CONTROLS[kind] for kind in CONTROLS if kind != order)]))
    assert not clean and any(kernel in line and line.endswith("a race") for line in lines)


def test_every_control_is_one_of_its_kind() -> None:
    assert {
        kernel: hazard.order for hazard in CONTROLS.values() for kernel in [hazard.first.kernel]
    } == sanitizer.CONTROLS
    lines, clean = sanitizer.verdict(Counter(CONTROLS.values()))
    assert clean and len(lines) == len(CONTROLS)


@pytest.mark.parametrize(
    "hazard",
    [
        MAXIMA._replace(kind="Potential WAR"),
        MAXIMA._replace(first=MAXIMA.first._replace(line=line_of(PAIRS, "shared.p_left.store"))),  # another barrier
        MAXIMA._replace(second=MAXIMA.second._replace(line=line_of(PAIRS, "last_max = shared.max_right"))),
        MAXIMA._replace(second=MAXIMA.second._replace(kernel="hopper_forward_kernel")),
        MAXIMA._replace(first=MAXIMA.first._replace(file="common.py")),  # of which there are several
        MAXIMA._replace(first=MAXIMA.second, second=MAXIMA.first),
    ],
)
def test_what_no_barrier_orders_is_a_race(hazard: sanitizer.Hazard) -> None:
    assert not sanitizer.verdict(Counter([hazard, *CONTROLS.values()]))[1]


def test_a_kernel_without_warp_specialization_has_no_hand_over() -> None:
    hazards = sanitizer.hazards_in(report(CONTROL, hand_over("decode_kernel", "src/trunkattn/gpu/portable/decode.py")))
    assert not sanitizer.verdict(hazards)[1]


def test_no_hazard_is_clean() -> None:
    assert sanitizer.verdict(sanitizer.hazards_in(report())) == ([], True)


def test_a_report_that_is_not_understood_is_an_error() -> None:
    with pytest.raises(ValueError, match="counts 2 hazards, 1 were read"):
        sanitizer.hazards_in(report(KERNEL, CONTROL).replace("Read Thread", "Read by", 1))
    with pytest.raises(ValueError, match="counts None hazards"):
        sanitizer.hazards_in("no summary")


@pytest.mark.parametrize(
    ("status", "printed"), [(0, "1 passed"), (1, "========= Invalid __global__ read of size 4\n1 passed")]
)
def test_a_test_under_the_memory_checker(
    status: int, printed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def checker(command: list[str], **options: Any) -> SimpleNamespace:
        assert command[0] == "compute-sanitizer"
        assert command[command.index("--tool") + 1] == "memcheck"
        return SimpleNamespace(returncode=status, stdout=printed, stderr="")

    monkeypatch.setattr(sanitizer.subprocess, "run", checker)
    assert sanitizer.check_memory("tests/on_gpu/test_card.py::test_for_the_sanitizer") == (status == 0)
    assert printed in capsys.readouterr().out
