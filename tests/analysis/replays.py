"""Prices, an engine's size and logs for tests of replays."""

import numpy as np

from trunkattn.analysis.pricing.model_shape import model_shape
from trunkattn.analysis.pricing.prices import Prices
from trunkattn.analysis.records import LoggedRequest
from trunkattn.analysis.simulation.engine import EngineSize
from trunkattn.gpu.cards import card_named

PRICES = Prices(model_shape("llama-3-8b"), card_named("NVIDIA H100"))
SIZE = EngineSize(num_pages=4000, max_num_seqs=64)


def log_of(number: int, shared: int, own: int, output: int = 60, seconds: float = 0.05) -> list[LoggedRequest]:
    """Prompts of `shared` blocks that all have and `own` ones of their own."""
    blocks = [[*range(shared), *range(1000 * (i + 1), 1000 * (i + 1) + own)] for i in range(number)]
    size = 16 * (shared + own)
    return [LoggedRequest(i + 1, i * seconds, size, output, np.array(blocks[i], np.int64), 16) for i in range(number)]
