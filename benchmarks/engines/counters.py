"""What our back end has counted in all processes of an engine."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def counted() -> Iterator[None]:
    """A folder in which processes share their counters. An engine is imported inside, and not before."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
        yield


def counters() -> dict[str, float]:
    """What has been counted so far, summed over its labels but path and reason."""
    from prometheus_client import CollectorRegistry, multiprocess

    registry, found = CollectorRegistry(), dict[str, float]()
    multiprocess.MultiProcessCollector(registry)
    for metric in registry.collect():
        for sample in metric.samples:
            if sample.name.startswith("trunkattn_"):
                name = " ".join(
                    [sample.name, *(sample.labels[key] for key in ("path", "reason") if key in sample.labels)]
                )
                found[name] = found.get(name, 0.0) + sample.value
    return found
