"""Batches to plan and to measure: prefix trees, random forests, conversations. Needs only NumPy."""

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
from trunkattn.workloads.trees import PAT_TREES, PrefixTree, parse_tree, tree_batch

__all__ = [
    "PAT_TREES",
    "AgentRequest",
    "PagedBatch",
    "PrefixTree",
    "agent_batch",
    "agent_requests",
    "batch_of_prefixes",
    "conversation_batch",
    "conversation_lengths",
    "parse_tree",
    "poisson_arrivals",
    "random_forest",
    "tree_batch",
]
