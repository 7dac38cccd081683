"""What is measured and tested: batches, models' shapes, prefix trees, random forests, conversations."""

from benchmarks.workloads.forests import random_forest
from benchmarks.workloads.pat_trees import PAT_TREES
from trunkattn.analysis.batch import PagedBatch
from trunkattn.analysis.trees import TreeLevels, parse_tree, tree_batch

__all__ = ["PAT_TREES", "PagedBatch", "TreeLevels", "parse_tree", "random_forest", "tree_batch"]
