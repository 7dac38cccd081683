"""What sharing saves: a line in vLLM's log, and counters for Prometheus.

Both are kept in the process where the attention runs: a worker, which is the engine's own process only with
VLLM_ENABLE_V1_MULTIPROCESSING=0 on one card. Each worker logs its totals every 10 seconds while it runs steps.

The counters are in prometheus_client's default registry of that process. vLLM's own counters reach /metrics through
messages of a fixed form from the engine to the API server, and a plug-in cannot extend these. To see ours in vLLM's
/metrics, let prometheus_client share them between processes: set PROMETHEUS_MULTIPROC_DIR to an empty folder before
`vllm serve`. (vLLM sets it itself if it starts several API servers.)

    trunkattn_kv_bytes_read_total     KV bytes that the attention of the counted rows read
    trunkattn_kv_bytes_saved_total    further bytes that it would have read if each request read its own
    trunkattn_steps_total             path: decode, mixed, prefill, or full_graph (decoding replayed by a CUDA graph)
    trunkattn_steps_unshared_total    reason: one_request, nothing_shared (no common prefix, or none large enough for
                                      its own tile), no_decode (on a GPU prompts run in FlashAttention, which shares
                                      nothing)

All counters have the labels model_name, engine (number of the data-parallel engine), rank (number of the worker) and
attention (full, or the window). Sum the bytes over ranks and attentions; each of them counts every step. Attention
groups that have equal windows share a label, and each of them counts every step there: no builder sees the others, and
which of them exist is known only after all are made. On a GPU only decode rows are counted.
"""

from typing import Any

from vllm.logger import init_logger

from trunkattn.integrations.kv_traffic import KvReadStats, Labels, prometheus_counters

logger = init_logger("vllm.trunkattn")


def kv_read_stats(vllm_config: Any, windows: set[int | None], num_layers: int) -> KvReadStats:
    """The counters of one attention group.

    Args:
        vllm_config: the engine's configuration, for the labels.
        windows: sliding windows of the group's layers; None: full attention.
        num_layers: layers of the group.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    labels = Labels(
        model_name=str(model.served_model_name if model else None),
        engine=str(getattr(parallel, "data_parallel_index", 0)),
        rank=str(getattr(parallel, "rank", 0)),
        attention="+".join("full" if window is None else f"window {window}" for window in sorted(windows, key=str)),
    )
    return KvReadStats(num_layers, prometheus_counters(labels), logger.info)
