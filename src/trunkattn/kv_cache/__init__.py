"""The paged KV cache: who holds which pages, which prefixes are cached, and the tensors behind the pages.

Everything exported here works without torch; the tensors are in `trunkattn.kv_cache.tensors`.
"""

from trunkattn.kv_cache.manager import CacheManager, CacheUsage, SlotUsage
from trunkattn.kv_cache.page_pool import OutOfPages, PageCopy, PagePool
from trunkattn.kv_cache.prefix_index import CachedBlock, PrefixIndex

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
