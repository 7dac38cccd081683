"""What an analysis is asked for: card, model, engine, arrivals, fleet."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from trunkattn.engine.config import check_budget, check_scheduler_policy
from trunkattn.names import FP8_CACHES
from trunkattn.validate import check_int, check_real, keep_int

Progress = Callable[[str, float], None]
"""Called now and then with what is being done, for people, and the share of it that is done, 0 to 1."""

ROUTES: Final = ("random", "round-robin", "prefix", "sharers")
MOST_REPLICAS: Final = 1024
MOST_PAGES: Final = 10_000_000  # of each of which a replay holds a record
KV_CACHE_DTYPES: Final = ("auto", *dict.fromkeys(FP8_CACHES.values()))


@dataclass(frozen=True)
class Settings:
    """What an analysis is asked for.

    Attributes:
        card: name of a card that was measured, such as "NVIDIA H100".
        model: name of a built-in shape, such as "llama-3-8b", or path of a config.json or of the folder that has it.
        tensor_parallel: cards that share each layer.
        kv_cache_dtype: "auto" (16 bits), "float8_e4m3fn" or "float8_e5m2".
        concurrencies: numbers of requests at a time, for each of which a closed loop is replayed.
        rates: requests per second, for each of which the log is replayed in addition.
        as_logged: replay the log's own times, where it has them. Then this replay comes first.
        max_num_seqs: sequences that run at once where requests arrive by time.
        page_size: tokens per page.
        num_pages: pages of the cache; None: those of `kv_cache_bytes`.
        kv_cache_bytes: of the cache, on all cards; None: what their memory holds beside the weights.
        max_num_batched_tokens: token budget of a step.
        scheduler_policy: "chunked_prefill" or "prefill_first".
        enable_prefix_caching: requests reuse pages of others.
        output_tokens: answer length of requests for which the log names none.
        max_requests: all replays after the first, and those of spoilers, use only this many leading requests of the
            log; None: all.
        replicas: engines of a fleet; 1: no fleet is replayed.
        route: one of `ROUTES`; None: the fleet is replayed with each of them.
        find_spoilers: whether to look for what spoils sharing.
        seed: of the arrivals at a chosen rate, and of random routes.

    Raises:
        TypeError, ValueError: `name=value: expected ...`. Whether card and model are known is seen when they are used.
    """

    card: str = "NVIDIA H100"
    model: str = "llama-3-8b"
    tensor_parallel: int = 1
    kv_cache_dtype: str = "auto"
    concurrencies: tuple[int, ...] = (1, 4, 16, 64)
    rates: tuple[float, ...] = ()
    as_logged: bool = True
    max_num_seqs: int = 256
    page_size: int = 16
    num_pages: int | None = None
    kv_cache_bytes: int | None = None
    max_num_batched_tokens: int = 8192
    scheduler_policy: str = "chunked_prefill"
    enable_prefix_caching: bool = True
    output_tokens: int = 256
    max_requests: int | None = 10_000
    replicas: int = 1
    route: str | None = None
    find_spoilers: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("tensor_parallel", "max_num_seqs", "page_size", "max_num_batched_tokens", "output_tokens"):
            keep_int(self, name, at_least=1)
        keep_int(self, "replicas", at_least=1, at_most=MOST_REPLICAS)
        keep_int(self, "seed", at_least=0)
        for name, most in (("num_pages", MOST_PAGES), ("kv_cache_bytes", None), ("max_requests", None)):
            if getattr(self, name) is not None:
                keep_int(self, name, at_least=1, at_most=most)
        check_budget(self.max_num_seqs, self.max_num_batched_tokens)
        for concurrency in self.concurrencies:
            if check_int("concurrencies", concurrency, at_least=1) > self.max_num_batched_tokens:
                raise ValueError(
                    f"concurrencies={concurrency}: expected at most max_num_batched_tokens="
                    f"{self.max_num_batched_tokens}, so that every running answer gets a token in each step"
                )
        if self.num_pages is not None and self.kv_cache_bytes is not None:
            raise ValueError(f"num_pages={self.num_pages}: expected it without kv_cache_bytes, which says it too")
        for rate in self.rates:
            expected = "a finite number of requests per second above 0"
            if check_real("rates", rate, expected) <= 0:
                raise ValueError(f"rates={rate!r}: expected {expected}")
        check_scheduler_policy("scheduler_policy", self.scheduler_policy)
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise ValueError(f"kv_cache_dtype={self.kv_cache_dtype!r}: expected one of {', '.join(KV_CACHE_DTYPES)}")
        if self.route is not None and self.route not in ROUTES:
            raise ValueError(f"route={self.route!r}: expected one of {', '.join(ROUTES)}")
        if self.route is not None and self.replicas == 1:
            raise ValueError(f"route={self.route!r}: expected it with replicas of at least 2, among which to route")
        if not (self.concurrencies or self.rates or self.as_logged):
            raise ValueError("concurrencies=(): expected a number of requests at a time, a rate, or the log's times")
