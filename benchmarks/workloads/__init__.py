"""What is measured and tested: batches, models' shapes, prefix trees, random forests, conversations."""

from benchmarks.workloads.forests import random_forest
from benchmarks.workloads.pat_trees import PAT_TREES
from benchmarks.workloads.serving import (
    AgentRequest,
    agent_batch,
    agent_requests,
    batch_of_prefixes,
    conversation_batch,
    conversation_lengths,
    poisson_arrivals,
)
from trunkattn.analysis.batch import PagedBatch
from trunkattn.analysis.trees import TreeLevels, parse_tree, tree_batch

__all__ = [
    "PAT_TREES",
    "AgentRequest",
    "PagedBatch",
    "TreeLevels",
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
