"""What sharing saves: a line in SGLang's log, and counters for Prometheus.

Both are kept in the process where the attention runs: a scheduler. Each logs its totals every 10 seconds while it runs
steps. With `--enable-metrics` SGLang's /metrics has the counters of all of them:

    trunkattn_kv_bytes_read_total     KV bytes that the attention of the counted rows read
    trunkattn_kv_bytes_saved_total    further bytes that it would have read if each request read its own
    trunkattn_steps_total             path: decode, mixed, prefill, or full_graph (decoding replayed by a CUDA graph)
    trunkattn_steps_unshared_total    reason: one_request, nothing_shared (no common prefix, or none large enough for
                                      its own tile)

All counters have the labels model_name, engine (number of the data-parallel engine), rank (number of the worker) and
attention (the back end's layers: full, the window, or both). A step that another back end computes is not counted.
"""

from collections.abc import Iterable
from typing import Any

from trunkattn.integrations.kv_traffic import KvReadStats, Labels, prometheus_counters
from trunkattn.integrations.sglang import versions
from trunkattn.integrations.sglang.name import logger


def kv_read_stats(runner: Any, windows: Iterable[int | None], num_layers: int) -> KvReadStats:
    """The counters of a model runner.

    Args:
        runner: SGLang's model runner, for the labels.
        windows: sliding windows of the layers; None: full attention.
        num_layers: attention layers.
    """
    labels = Labels(
        model_name=str(getattr(versions.options_in_effect(runner), "served_model_name", None)),
        engine=str(versions.data_rank(runner)),
        rank=str(versions.rank(runner)),
        attention="+".join("full" if window is None else f"window {window}" for window in sorted(windows, key=str)),
    )
    return KvReadStats(num_layers, prometheus_counters(labels), logger.info)
