"""What `make test-gpu` reads from the race checker's report."""

from pathlib import Path
from typing import Any

import pytest

from ..on_gpu import racecheck

HEAD = "========= COMPUTE-SANITIZER\n"
# as it was printed on a card, between pytest's dots
PRINTED = """.========= Error: Potential RAW hazard detected at __shared__ 0x433 in block (77,0,0) :
=========     Write Thread (31,0,0) at warp_specialized_kernel+0x5d0 in test_warp_specialization.py:{written}
.=========     Read Thread (160,0,0) at warp_specialized_kernel+0x1a0 in test_warp_specialization.py:{read}
=========     Current Value : 2
=========     Saved host backtrace up to driver entry point at kernel launch time
=========
"""


def report(*hazards: racecheck.Hazard) -> str:
    lines = [HEAD]
    for kind, *accesses in hazards:
        lines.append(f"========= Error: {kind} hazard detected at __shared__ 0x14140 in block (18,0,0) :\n")
        for what, thread, kernel, file, line in accesses:
            lines.append(f"=========     {what} Thread ({thread},0,0) at {kernel}+0x4240 in {file}:{line}\n")
        lines.append("=========     Current Value : 2\n========= \n")
    return "".join(lines) + summary(len(hazards))


def summary(count: int) -> str:
    return f"========= RACECHECK SUMMARY: {count} hazards displayed ({count} errors, 0 warnings)\n"


def line_of(file: str, text: str) -> int:
    for folder in ("tests/on_gpu", "src/trunkattn/gpu/hopper", "src/trunkattn/gpu/portable"):
        path = Path(racecheck.HERE.parents[1], folder, file)
        for number, line in enumerate(path.read_text().splitlines() if path.exists() else (), 1):
            if line.strip().startswith(text):
                return number
    raise LookupError(f"no line of {file} begins with {text!r}")


def hand_over(kernel: str, file: str) -> racecheck.Hazard:
    place = (kernel, file, line_of(file, f"def {kernel}("))
    return racecheck.Hazard(
        "Potential RAW", racecheck.Access("Write", 95, *place), racecheck.Access("Read", 192, *place)
    )


CONTROL, KERNEL = (
    hand_over("warp_specialized_kernel", "test_warp_specialization.py"),
    hand_over("hopper_decode_kernel", "decode.py"),
)


def test_a_hand_over_is_set_aside_if_the_control_is_reported_too() -> None:
    end = KERNEL.first._replace(line=line_of("decode.py", "gl.warp_specialize("))
    lines, clean = racecheck.verdict(racecheck.hazards_in(report(KERNEL, CONTROL, KERNEL, KERNEL._replace(first=end))))
    assert clean
    assert [line.split(" x ")[0] for line in lines] == ["2", "1", "1"]
    lines, clean = racecheck.verdict(racecheck.hazards_in(report(KERNEL)))
    assert not clean
    assert "a race" in lines[0]


def test_a_report_as_it_was_printed() -> None:
    line = line_of("test_warp_specialization.py", "def warp_specialized_kernel(")
    printed = HEAD + PRINTED.format(written=line, read=line) + PRINTED.format(written=line, read=line) + summary(2)
    (hazard, again) = racecheck.hazards_in(printed)
    assert hazard == again
    assert hazard.first == ("Write", 31, "warp_specialized_kernel", "test_warp_specialization.py", line)
    assert hazard.second == ("Read", 160, "warp_specialized_kernel", "test_warp_specialization.py", line)
    assert hazard.is_hand_over


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "Potential WAR"},
        {"first": {"what": "Read"}},
        {"second": {"what": "Write"}},
        {"first": {"line": 1}},
        {"first": {"line": KERNEL.first.line + 1}},
        {"second": {"line": KERNEL.second.line + 1}},
        {"second": {"line": line_of("decode.py", "gl.warp_specialize(")}},
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
    hazards = racecheck.hazards_in(report(CONTROL, KERNEL._replace(**parts)))
    assert not racecheck.verdict(hazards)[1]


def test_a_kernel_without_warp_specialization_has_no_hand_over() -> None:
    hazards = racecheck.hazards_in(report(CONTROL, hand_over("decode_kernel", "decode.py")))
    assert not racecheck.verdict(hazards)[1]


def test_no_hazard_is_clean() -> None:
    assert racecheck.verdict(racecheck.hazards_in(report())) == ([], True)


def test_a_report_that_is_not_understood_is_an_error() -> None:
    with pytest.raises(ValueError, match="counts 2 hazards, 1 were read"):
        racecheck.hazards_in(report(KERNEL, CONTROL).replace("Read Thread", "Read by", 1))
    with pytest.raises(ValueError, match="counts None hazards"):
        racecheck.hazards_in("no summary")
