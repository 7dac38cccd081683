"""Whether vLLM or SGLang answers with our attention as it does with its own.

    python -m benchmarks.engines.equality --engine vllm    # results/vllm-equality-CARD.json
    python -m benchmarks.engines.equality --engine sglang  # results/sglang-equality-CARD.json
    python -m benchmarks.engines.equality --engine sglang --cases tensor-parallel --suffix=-tp2
    python -m benchmarks.engines.equality --engine sglang --device cpu --quick --output FILE

Small models with random weights, scaled so that the answer hangs on what is far back (a control with other tokens in
the shared prefix shows it), in one process per case and back end, --at-once of them side by side on one card. Requests
are greedy and share a prefix; each is generated twice, the second time from the prefix cache. `equality_cases.py` says
what the cases are; without --cases they are all that one card has.

Three things are compared with the engine's own back end: how many tokens are equal before the first that differs, the
log-probabilities of these equal tokens, and the gap, which is how far apart the engine's own back end saw the two
candidates where answers part. An answer is `within_rounding` if all of this holds:

- 99 % of the log-probabilities differ by at most three times the difference between two rounds of the engine's own back
  end, or by at most one step of a logit in the model's dtype;
- the largest difference is at most three times the largest one between those two rounds, or three such steps;
- no gap is wider than both the first of these bounds and the largest difference.

vLLM's rows also compare each back end with itself in the plainest case of the same model (`alone`), and SGLang's rows
compare ours with SGLang's own there (`plain`).

A case fails if an engine does, if a back end is not within rounding, or if ours has not counted the steps that it
should have computed. The script then ends with 1. vLLM's own back end rounds queries to fp8 with an fp8 cache, so that
ours may differ there.

On a CPU, SGLang needs what `make test-sglang` sets. --quick takes smaller models, fewer prompts and fewer tokens.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.engines.adapters import ENGINES, add_device, add_engine, card_name, need_device, parse
from benchmarks.engines.counters import counted, counters
from benchmarks.engines.interface import Adapter, Case
from benchmarks.engines.jobs import Job, run_jobs
from benchmarks.engines.rounding import compare, within_rounding
from benchmarks.lib.options import integer, positive
from benchmarks.lib.report import short_name, write_result
from benchmarks.workloads.small_models import QUICK, folder_name, long_prompts, prompts, save_model

TOKENS, QUICK_TOKENS, QUICK_PROMPTS = 48, 16, slice(None, None, 3)
STEPS = {"cuda": 2**-4, "cpu": 1e-4}  # between two logits of 8 to 16 in bfloat16; float32 is not what limits there
ROUNDS = ("cold", "cached")


def work(engine: Adapter, case: Case, backend: str, arguments: argparse.Namespace, answer: Path) -> None:
    """One case with one back end, in a process of its own."""
    which, tokens = (QUICK_PROMPTS, QUICK_TOKENS) if arguments.quick else (slice(None), TOKENS)
    asked, others = ((long_prompts if case.long_prompts else prompts)(changed)[which] for changed in (False, True))
    start = engine.equality_start(case, backend, answer.parent / folder_name(case.shape), arguments.device)
    with counted():
        ready = engine.offline(start._replace(port=arguments.port))
        rounds = [ready.answers(asked, tokens, case.samples, logprobs) for logprobs in (not case.mixes, True)]
        control, _ = ready.answers(others, tokens, case.samples)
        found: dict[str, Any] = {
            "card": card_name(arguments.device), "rounds": [each for each, _ in rounds], "control": control,
            "facts": [facts for _, facts in rounds],
        }  # fmt: skip
        if case.alone:
            found["alone"] = []
            for prompt in asked:
                ready.empty_cache()
                found["alone"] += ready.answers([prompt], tokens)[0]
        found["counters"] = {name: count for name, count in counters().items() if count and "created" not in name}
        ready.shutdown()
    answer.write_text(json.dumps(found))


def run_cases(engine: Adapter, arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Runs of cases, by case and back end."""
    cases = {name: engine.CASES[name] for name in arguments.cases}
    wanted = [(name, case, backend) for name, case in cases.items() for backend in case.backends_on(arguments.device)]
    with tempfile.TemporaryDirectory() as folder, engine.own_ports(len(wanted)) as ports:
        own = ["--engine", arguments.engine, "--device", arguments.device] + ["--quick"] * arguments.quick
        numbered = [["--port", str(port)] for port in ports] or [[]] * len(wanted)
        jobs = [
            Job(name, backend, [*own, *port], case.environment)
            for (name, case, backend), port in zip(wanted, numbered, strict=True)
        ]
        for name, case in {folder_name(case.shape): case for case in cases.values()}.items():
            shape = {**case.shape, **(QUICK if arguments.quick else {})}
            save_model(Path(folder, name), shape, "float32" if arguments.device == "cpu" else "bfloat16")
        program = ["-m", "benchmarks.engines.equality"]
        found = run_jobs(program, jobs, Path(folder), arguments.at_once, arguments.limit)
        if arguments.logs:
            arguments.logs.mkdir(parents=True, exist_ok=True)
            for log in Path(folder).glob("*.log"):
                shutil.copy(log, arguments.logs)
        return found


def failures(engine: Adapter, case: Case, found: Mapping[str, Any]) -> dict[str, list[str]]:
    """Reasons by back end why a case has no result."""
    failed = {backend: run["failed"] for backend, run in found.items() if "failed" in run}
    if not failed:
        failed = {backend: engine.missing(case, backend, run) for backend, run in found.items()}
    return {backend: reasons for backend, reasons in failed.items() if reasons}


def beside(run: Mapping[str, Any], first: Mapping[str, Any], step: float) -> dict[str, Any]:
    """Both rounds of a back end compared with those of the first. step: see `within_rounding`."""
    own = compare(first["rounds"][1], first["rounds"][0])
    compared = {name: compare(run["rounds"][number], first["rounds"][number]) for number, name in enumerate(ROUNDS)}
    return compared | {"within_rounding": all(within_rounding(each, own, step) for each in compared.values())}


def same_bits(run: Mapping[str, Any]) -> dict[str, int]:
    """How many requests have the same tokens and log-probabilities by themselves and batched."""
    same = {
        name: sum(a == b for a, b in zip(run["alone"], batched, strict=True))
        for name, batched in zip(ROUNDS, run["rounds"], strict=True)
    }
    return same | {"of": len(run["alone"])}


def summarize(
    engine: Adapter, name: str, found: Mapping[str, Any], plain: Mapping[str, Any], step: float
) -> dict[str, Any]:
    """A row of the result. plain: what the plainest case of the same model found. step: see `within_rounding`."""
    case = engine.CASES[name]
    if failed := failures(engine, case, found):
        return {"case": name, "failed": failed}
    (first, theirs), *others = found.items()
    plain = {} if any("failed" in run for run in plain.values()) else plain
    row: dict[str, Any] = {"case": name}
    if engine.PACKAGE == "vllm":  # it has one back end of ours, so that a row is about that
        ((_, ours),) = others
        row |= {"counters": ours["counters"]} | beside(ours, theirs, step)
        if plain:
            row["alone"] = {each: compare(run["rounds"][0], plain[each]["rounds"][0]) for each, run in found.items()}
        if case.alone:
            row |= {f"same_bits_{each}": same_bits(run) for each, run in found.items()}
    else:
        row |= {"first": first, "facts": theirs["facts"]}
        for backend, run in others:
            row[backend] = beside(run, theirs, step) | {"facts": run["facts"], "counters": run["counters"]}
            if plain:
                row[backend]["plain"] = compare(run["rounds"][1], next(iter(plain.values()))["rounds"][1])
    row["control"] = compare(theirs["control"], theirs["rounds"][0])
    return row | {"same_backend_cold_and_cached": compare(theirs["rounds"][1], theirs["rounds"][0])}


def plain_of(engine: Adapter, name: str) -> str | None:
    """The plainest other case of the same model that asks for the same answers."""
    case = engine.CASES[name]
    plain = engine.PLAIN.get(folder_name(case.shape))
    return plain if plain != name and case.samples == 1 else None


def has_failed(engine: Adapter, row: Mapping[str, Any]) -> bool:
    """Whether a row says that a case did not work, or that its answers differ by more than rounding."""
    if "failed" in row:
        return True
    judged = [row, *(each for each in row.values() if type(each) is dict)]
    return not (engine.CASES[row["case"]].rounds_queries or all(each.get("within_rounding", True) for each in judged))


def read_arguments(given: Sequence[str] | None = None) -> tuple[Adapter, argparse.Namespace]:
    """The engine, and the command's arguments, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine(parser)
    add_device(parser)
    names = {engine: ", ".join(has.CASES) for engine, has in ENGINES.items()}
    known_cases = "; ".join(f"{engine}: {cases}" for engine, cases in names.items())
    parser.add_argument("--cases", nargs="+", metavar="CASE", help=known_cases)
    parser.add_argument("--quick", action="store_true", help="with smaller models, fewer prompts and tokens; SGLang")
    parser.add_argument("--at-once", type=integer(1, 64), default=10, help="processes that run side by side")
    parser.add_argument("--limit", type=positive, default=900.0, help="seconds that a process may take")
    parser.add_argument("--logs", type=Path, help="a folder for what each process says")
    parser.add_argument("--suffix", default="", help="of the result's name")
    parser.add_argument("--output", type=Path, help="write here instead of into results/")
    parser.add_argument("--work", nargs=3, metavar=("CASE", "BACKEND", "FILE"), help=argparse.SUPPRESS)
    parser.add_argument("--port", type=integer(1, 65535), help=argparse.SUPPRESS)
    engine, arguments = parse(parser, given)
    cases = engine.CASES
    fitting = [name for name, case in cases.items() if case.cards == 1 and case.backends_on(arguments.device)]
    arguments.cases = arguments.cases or fitting
    for name in arguments.cases:
        if name not in cases:
            parser.error(f"argument --cases: {name!r}: expected some of {names[arguments.engine]}")
        if not cases[name].backends_on(arguments.device):
            parser.error(f"argument --cases: {name} cannot be judged on a CPU; leave it out")
    return engine, arguments


def main() -> None:
    engine, arguments = read_arguments()
    if arguments.work:
        name, backend, answer = arguments.work
        return work(engine, engine.CASES[name], backend, arguments, Path(answer))
    need_device(engine, arguments.device)
    found = run_cases(engine, arguments)
    rows = []
    for name in arguments.cases:
        plain = found.get(plain_of(engine, name) or "", {})
        rows.append(summarize(engine, name, found[name], plain, STEPS[arguments.device]))
        print(json.dumps(rows[-1])[:1500], flush=True)
    card = next((run["card"] for case in found.values() for run in case.values() if "card" in run), "none")
    name = f"{engine.PACKAGE}-equality-{short_name(card)}{arguments.suffix}"
    print(write_result(name, {"card": card, "rows": rows}, engine.PACKAGE, "triton", path=arguments.output))
    sys.exit(any(has_failed(engine, row) for row in rows))


if __name__ == "__main__":
    main()
