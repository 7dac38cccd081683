"""Memory of cards: bytes of a token in the KV cache, and pages that fit beside the weights. No torch here."""

from types import MappingProxyType
from typing import Final

from trunkattn.analysis.pricing.model_shape import ModelShape
from trunkattn.analysis.settings import KV_CACHE_DTYPES, MOST_PAGES, Settings
from trunkattn.gpu.cards import Card

NUMBER_BYTES: Final = MappingProxyType({name: 2 if name == "auto" else 1 for name in KV_CACHE_DTYPES})
_RESERVED: Final = 0.9  # share of the card's memory that an engine takes
_ACTIVATION_BYTES: Final = 2 * 10**9


def check_cards(shape: ModelShape, cards: int) -> None:
    """Raises ValueError unless this number of cards can share a layer of the model."""
    if cards < 1 or shape.num_qo_heads % cards or (shape.num_kv_heads % cards and cards % shape.num_kv_heads):
        raise ValueError(
            f"tp={cards}: expected a number of cards that divides the {shape.num_qo_heads} query heads and divides "
            f"or is divided by the {shape.num_kv_heads} KV heads of {shape.name}"
        )


def layer_token_bytes(shape: ModelShape, cards: int, kv_cache_dtype: str) -> int:
    """Bytes of one token in the cache of one layer, on all cards."""
    copies = max(1, cards // shape.num_kv_heads)
    return shape.cached_numbers() * NUMBER_BYTES[kv_cache_dtype] * copies


def cache_pages(settings: Settings, shape: ModelShape, card: Card) -> int:
    """Pages of the KV cache: as many as were asked for, or as fit into the memory of the cards.

    Raises:
        ValueError: the weights do not fit, or the cache is smaller than a page or larger than a replay can hold.
    """
    if settings.num_pages is not None:
        return settings.num_pages
    cards, page_size, num_bytes = settings.tensor_parallel, settings.page_size, settings.kv_cache_bytes
    page_bytes = layer_token_bytes(shape, cards, settings.kv_cache_dtype) * shape.num_layers * page_size
    if num_bytes is not None and num_bytes < page_bytes:
        raise ValueError(
            f"kv_cache_bytes={num_bytes}: expected at least the {page_bytes} bytes of a page of {page_size} tokens"
        )
    assert card.model.engine  # `card_named` finds no other card
    free = int(_RESERVED * card.model.engine.memory_bytes * cards - shape.total_bytes() - _ACTIVATION_BYTES)
    if num_bytes is None and free < page_bytes // page_size:
        raise ValueError(
            f"{shape.name} has {shape.total_bytes() / 1e9:.0f} GB of weights, which {cards} x {card.model.name} do not "
            f"hold beside a KV cache: expected more cards, with --tp"
        )
    pages = (free if num_bytes is None else num_bytes) // page_bytes
    if not 1 <= pages <= MOST_PAGES:
        name, given = ("page_size", page_size) if num_bytes is None else ("kv_cache_bytes", num_bytes)
        raise ValueError(
            f"{name}={given}: the cache has {pages} pages of {page_size} tokens then; expected 1 to {MOST_PAGES}"
        )
    return pages
