"""Floor 4: the paged KV cache. Everything exported here is free of torch; the tensors are in `cache.kv_cache`."""

from trunkattn.cache.manager import CacheManager, CacheUsage, SlotUsage
from trunkattn.cache.page_pool import OutOfPages, PageCopy, PagePool
from trunkattn.cache.prefix_index import CachedBlock, PrefixIndex

__all__ = [
    "CacheManager",
    "CacheUsage",
    "CachedBlock",
    "OutOfPages",
    "PageCopy",
    "PagePool",
    "PrefixIndex",
    "SlotUsage",
]
