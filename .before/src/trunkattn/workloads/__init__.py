"""Batches to plan and to measure: prefix trees, random forests, recorded traffic. NumPy only."""

from trunkattn.workloads.batch import PagedBatch
from trunkattn.workloads.forests import random_forest
from trunkattn.workloads.serving import (
    AgentRequest,
    agent_batch,
    agent_requests,
    batch_of_prefixes,
    conversation_batch,
    conversation_lengths,
    poisson_arrivals,
)
from trunkattn.workloads.traces import HASH_BLOCK_TOKENS, TraceRequest, decode_batches, read_trace
from trunkattn.workloads.trees import PAT_TREES, PrefixTree, parse_tree, tree_batch

__all__ = [
    "HASH_BLOCK_TOKENS",
    "PAT_TREES",
    "AgentRequest",
    "PagedBatch",
    "PrefixTree",
    "TraceRequest",
    "agent_batch",
    "agent_requests",
    "batch_of_prefixes",
    "conversation_batch",
    "conversation_lengths",
    "decode_batches",
    "parse_tree",
    "poisson_arrivals",
    "random_forest",
    "read_trace",
    "tree_batch",
]
