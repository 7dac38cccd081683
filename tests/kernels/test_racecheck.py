"""What `make test-gpu` reads from the race checker's report."""

from pathlib import Path

import pytest

from ..gpu import racecheck


def report(*hazards: tuple[str, str, str, str]) -> str:
    lines = ["========= COMPUTE-SANITIZER", "..    [100%]"]
    for kind, kernel, wrote, read in hazards:
        lines += [
            f"========= Error: {kind} hazard detected at __shared__ 0x14140 in block (18,0,0) :",
            f"=========     Write Thread (95,0,0) at {kernel}+0x4240 in {wrote}",
            f"=========     Read Thread (192,0,0) at {kernel}+0x110 in {read}",
            "=========     Current Value : 2",
            "========= ",
        ]
    count = len(hazards)
    return "\n".join([*lines, f"========= RACECHECK SUMMARY: {count} hazards displayed ({count} errors, 0 warnings)"])


def hand_over(kernel: str, file: str) -> tuple[str, str, str, str]:
    lines = racecheck.lines_with_roles(kernel, file)
    return "Potential RAW", kernel, f"{file}:{lines[-1]}", f"{file}:{lines[0]}"


CONTROL, KERNEL = hand_over("roles_kernel", "test_roles.py"), hand_over("decode_hopper_kernel", "decode_hopper.py")


def test_a_hand_over_is_set_aside_if_the_control_is_reported_too() -> None:
    lines, clean = racecheck.verdict(racecheck.hazards_in(report(KERNEL, CONTROL, KERNEL)))
    assert clean
    assert [line.split(" x ")[0] for line in lines] == ["2", "1"]
    lines, clean = racecheck.verdict(racecheck.hazards_in(report(KERNEL)))
    assert not clean
    assert "a race" in lines[0]


@pytest.mark.parametrize(
    "kind, wrote, read",
    [
        ("Potential WAR", KERNEL[2], KERNEL[3]),  # another kind
        ("Potential RAW", KERNEL[2], KERNEL[2]),  # read elsewhere in the kernel
        ("Potential RAW", "decode_hopper.py:1", KERNEL[3]),  # written elsewhere
        ("Potential RAW", KERNEL[2], "hopper.py:90"),
    ],
)
def test_anything_else_is_a_race(kind: str, wrote: str, read: str) -> None:
    hazards = racecheck.hazards_in(report(CONTROL, (kind, "decode_hopper_kernel", wrote, read)))
    assert not racecheck.verdict(hazards)[1]


def test_a_kernel_without_roles_has_no_hand_over() -> None:
    source = Path(racecheck.HERE.parents[1], "src/trunkattn/kernels/decode.py").read_text().splitlines()
    line = source.index("def decode_kernel(") + 1
    place = f"decode.py:{line}"
    hazards = racecheck.hazards_in(report(CONTROL, ("Potential RAW", "decode_kernel", place, place)))
    assert not racecheck.verdict(hazards)[1]


def test_no_hazard_is_clean() -> None:
    assert racecheck.verdict(racecheck.hazards_in(report())) == ([], True)


def test_a_report_that_is_not_understood_is_an_error() -> None:
    with pytest.raises(ValueError, match="counts 2 hazards, 1 were read"):
        racecheck.hazards_in(report(KERNEL, CONTROL).replace("Read Thread", "Read by", 1))
    with pytest.raises(ValueError, match="counts None hazards"):
        racecheck.hazards_in("no summary")
