"""What routing by prefix is worth to a fleet whose engines read trunks once, and what it costs in balance.

    python -m benchmarks.host.fleet --trace FILE   # writes benchmarks/results/fleet.json; needs no GPU

Each workload is replayed through the analysis on engines of Llama-3-8B, each with an H100 of its own, under each way to
route. --trace: Mooncake's conversation trace. Its first requests come as logged; other workloads are those of
`workloads/arrivals.py`. `ceiling` is the hit rate of one cache without an end for all engines.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.host.analysis_predictions import logged
from benchmarks.lib.options import existing
from benchmarks.lib.report import write_result
from benchmarks.workloads import arrivals
from trunkattn.analysis.ceiling import ceiling_of
from trunkattn.analysis.parallel import num_cores, run_all
from trunkattn.analysis.pricing.memory import cache_pages
from trunkattn.analysis.pricing.model_shape import model_shape
from trunkattn.analysis.pricing.prices import Prices
from trunkattn.analysis.reading.log import read_log
from trunkattn.analysis.records import LoggedRequest
from trunkattn.analysis.settings import ROUTES, Settings
from trunkattn.analysis.simulation.engine import EngineSize
from trunkattn.analysis.simulation.fleet import Fleet, fleet_replay, run_fleet
from trunkattn.analysis.simulation.load import Load, Workload
from trunkattn.analysis.simulation.timed_engine import ONE_BY_ONE, SHARED
from trunkattn.gpu.cards import card_named

REPLICAS = 4
MODEL, CARD = "llama-3-8b", "NVIDIA H100"
TRACE_REQUESTS = 1000
SECONDS = 60.0


def workloads(trace: Path) -> dict[str, Sequence[LoggedRequest]]:
    """Logs by name."""
    return {
        "Mooncake's conversations": read_log(trace).requests[:TRACE_REQUESTS],
        "conversation 12/s": logged(arrivals.conversation(12.0, SECONDS, ())),
        "toolagent 10/s": logged(arrivals.toolagent(10.0, SECONDS)),
        "documents 24/s": logged(arrivals.documents(24.0, SECONDS)),
    }


def rows_of(name: str, requests: Sequence[LoggedRequest]) -> Iterator[dict[str, Any]]:
    """A workload under each way to route."""
    prices = Prices(model_shape(MODEL), card_named(CARD))
    size = EngineSize(cache_pages(Settings(card=CARD, model=MODEL), prices.shape, prices.card))
    workload = Workload.of(requests, size, 256)
    ceiling = round(ceiling_of(workload.requests).hit_rate, 4)
    fleets = [Fleet(REPLICAS, route) for route in ROUTES]
    parts = [(fleet, clock) for fleet in fleets for clock in (SHARED, ONE_BY_ONE)]
    tasks = [partial(run_fleet, workload, size, prices, Load(), fleet, clock) for fleet, clock in parts]
    outcomes = run_all(tasks, [1.0] * len(tasks), lambda share: None, num_cores())
    for fleet, shared, one_by_one in zip(fleets, outcomes[::2], outcomes[1::2], strict=True):
        found = asdict(fleet_replay(fleet, shared, one_by_one))
        rounded = {key: round(value, 4) if isinstance(value, float) else value for key, value in found.items()}
        yield {"workload": name, "requests": len(workload.requests), "ceiling": ceiling, **rounded}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=existing, required=True, help="Mooncake's conversation trace")
    rows = []
    for name, requests in workloads(parser.parse_args().trace).items():
        for row in rows_of(name, requests):
            rows.append(row)
            print(row, flush=True)
    print(write_result("fleet", {"card": CARD, "model": MODEL, "replicas": REPLICAS, "rows": rows}))


if __name__ == "__main__":
    main()
