"""Which page holds the KV of which prefix: a hash chain over full blocks, checked against the tokens. No torch here."""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from numbers import Integral
from typing import Final

from trunkattn.validate import check_int


@dataclass(slots=True, eq=False)  # compared by identity: a block stands for one prefix
class CachedBlock:
    """One full page in the index: the last `page_size` tokens of a prefix, and the page that holds their KV."""

    parent: "CachedBlock | None"  # None for the root, which stands for the empty prefix
    key: int  # hash of (parent.key, tokens): the hash chain
    tokens: bytes  # the page's token ids as 32-bit integers; on a prefix's first page the salt comes before them
    page: int
    children: "dict[CachedBlock, None]" = field(default_factory=dict)  # a dict, for a reproducible order


_TOKEN_BYTES: Final = array("i").itemsize
_PACKED: Final = 16  # blocks that are packed at a time


def _is_int32(token: object) -> bool:
    return isinstance(token, Integral) and -(1 << 31) <= int(token) < 1 << 31


def _hash_block(parent_key: int, tokens: bytes) -> int:
    return hash((parent_key, tokens))


class PrefixIndex:
    """Maps prefixes of token ids, in whole pages, to the pages that hold their KV, so that requests can share them.

    A block's key is the hash of its parent's key and its own tokens. A key only finds candidates: a candidate is
    accepted if its parent *is* the block matched so far and its tokens are equal. So, by induction, the whole prefix
    is equal for any hash function, and no result depends on a hash or on its order.

    **Eviction** removes the least recently used page that nobody references. The caller marks a request's pages
    unreferenced from the last to the first, so a leaf normally goes before its ancestors. There is one exception: two
    requests compute one prefix at the same time, the first one's pages are indexed, and the second one's continuation
    is a child of theirs. Then the oldest page can have descendants in use, and these leave the index with it. This
    keeps two properties: every indexed block can be reached from the root, and every unreferenced page can be evicted,
    so their count is exact. (To refuse the eviction of a block with children would break the second one.) A referenced
    descendant is only forgotten; its request keeps it.

    **Salts.** Prefixes with different salts never share a page, whatever their tokens: a salt belongs to the first
    page's content. So nobody can find out from response times which prefixes another salt's requests have cached.

    Args:
        page_size: tokens per page.
        hash_block: hash_block(parent_key, tokens) -> int; tests replace it to make collisions.
    """

    def __init__(self, page_size: int, hash_block: Callable[[int, bytes], int] = _hash_block) -> None:
        self.page_size = check_int("page_size", page_size, 1)
        self.root = CachedBlock(parent=None, key=0, tokens=b"", page=-1)
        self._hash_block = hash_block
        self._buckets: dict[int, list[CachedBlock]] = {}
        self._blocks: dict[int, CachedBlock] = {}  # by page
        self._evictable: OrderedDict[int, None] = OrderedDict()  # pages, least recently used first

    def __len__(self) -> int:
        """Number of indexed pages."""
        return len(self._blocks)

    def __contains__(self, page: int) -> bool:
        return page in self._blocks

    def __iter__(self) -> Iterator[int]:
        """The indexed pages, in the order in which they were indexed."""
        return iter(self._blocks)

    @property
    def num_evictable(self) -> int:
        """Indexed pages that nobody references."""
        return len(self._evictable)

    def evictable_pages(self) -> list[int]:
        """The pages that nobody references, least recently used first."""
        return list(self._evictable)

    def match(self, tokens: Sequence[int], salt: bytes = b"") -> list[int]:
        """Pages of the longest indexed prefix of `tokens` with this salt, in whole pages. Changes nothing, not even the
        LRU order."""
        return [block.page for block in self._walk(self.root, self._pack(tokens, salt))]

    def block(self, page: int) -> CachedBlock:
        """The block that `page` is indexed as; KeyError if it is not."""
        return self._blocks[page]

    def is_indexed(self, block: CachedBlock) -> bool:
        """Whether `block`, and with it its ancestors, is still in the index. The root always is."""
        return block is self.root or self._blocks.get(block.page) is block

    def insert(
        self, parent: CachedBlock, tokens: Sequence[int], pages: Sequence[int], salt: bytes = b""
    ) -> CachedBlock:
        """Indexes `pages`, which hold the KV of `tokens`, as the continuation of `parent`; returns the last block.

        The salt counts only where the prefix begins, at the root. A block that already has a page keeps that page, and
        the blocks after it become its children. The new pages count as referenced until the caller calls
        `mark_unreferenced`.

        Raises:
            ValueError: `tokens` does not fill the pages exactly, or a page is already indexed as another prefix.
                Nothing has changed then.
        """
        if len(tokens) != len(pages) * self.page_size:
            raise ValueError(
                f"tokens has length {len(tokens)}: expected {len(pages) * self.page_size}, which fill {len(pages)} "
                f"pages of {self.page_size}"
            )
        if not self.is_indexed(parent):
            raise ValueError(f"parent: the block of page {parent.page} left the index: expected one that is in it")
        contents = list(self._pack(tokens, salt if parent is self.root else b""))
        known = self._walk(parent, contents)
        new_pages = pages[len(known) :]
        if len(set(new_pages)) != len(new_pages) or any(page in self._blocks for page in new_pages):
            raise ValueError(f"pages={list(new_pages)}: expected distinct pages that are indexed as no other prefix")
        block = known[-1] if known else parent
        for content, page in zip(contents[len(known) :], new_pages, strict=True):
            block = self._add(block, content, page)
        return block

    def mark_referenced(self, pages: Iterable[int]) -> None:
        """Protects these indexed pages from eviction, because a request references them."""
        for page in pages:
            self._evictable.pop(page, None)

    def mark_unreferenced(self, pages: Iterable[int]) -> list[int]:
        """Makes those of these pages that are indexed evictable: in this order they become the most recently used.
        Returns the others."""
        others = []
        blocks, evictable = self._blocks, self._evictable
        for page in pages:
            if page in blocks:
                evictable[page] = None
            else:
                others.append(page)
        return others

    def evict(self, n: int) -> list[int]:
        """Drops the `n` least recently used unreferenced pages and their descendants; returns the unreferenced ones.

        Because of the descendants the result can have more than `n` pages.

        Raises:
            ValueError: fewer than `n` pages are evictable.
        """
        check_int("n", n, 0, len(self._evictable))
        evicted: list[int] = []
        for page in list(islice(self._evictable, n)):
            if len(evicted) >= n:
                break
            if page in self._evictable:  # else it went with an ancestor
                self._remove(self._blocks[page], evicted)
        return evicted

    def clear(self) -> list[int]:
        """Forgets every prefix; returns the pages that nobody references."""
        unreferenced = self.evictable_pages()
        self.root.children.clear()
        self._buckets.clear()
        self._blocks.clear()
        self._evictable.clear()
        return unreferenced

    def check_integrity(self) -> None:
        """Raises RuntimeError unless tree, hash buckets, page map and LRU order agree. The time is linear in the
        number of indexed pages."""
        reached = list(self.root.children)
        for block in reached:
            reached.extend(block.children)
            parent = block.parent
            if parent is None or block not in parent.children or self._blocks.get(block.page) is not block:
                raise RuntimeError(f"page {block.page} is not linked with its parent or the page map")
            size = self.page_size * _TOKEN_BYTES
            if len(block.tokens) < size or (len(block.tokens) > size and parent is not self.root):
                raise RuntimeError(f"page {block.page} is indexed with a partial block")
            if block.key != self._hash_block(parent.key, block.tokens) or block not in self._buckets[block.key]:
                raise RuntimeError(f"page {block.page} is not in the bucket of its key")
            if self._find(parent, block.tokens) is not block:
                raise RuntimeError(f"page {block.page} is indexed for a prefix that another page is indexed for")
        if len(reached) != len(self._blocks):
            raise RuntimeError("an indexed page cannot be reached from the root")
        if sum(map(len, self._buckets.values())) != len(self._blocks) or not all(self._buckets.values()):
            raise RuntimeError("a hash bucket is empty, or it holds a block that is not in the index")
        if not self._evictable.keys() <= self._blocks.keys():
            raise RuntimeError("the LRU order holds a page that is not indexed")

    def _pack(self, tokens: Sequence[int], salt: bytes) -> Iterator[bytes]:
        """The full blocks of `tokens`. They are packed a few at a time, so that a match that fails early does not read
        the rest."""
        end, step = len(tokens) - len(tokens) % self.page_size, _PACKED * self.page_size
        size = self.page_size * _TOKEN_BYTES
        for start in range(0, end, step):
            some = tokens[start : min(start + step, end)]
            try:
                packed = array("i", some).tobytes()
            except (TypeError, OverflowError) as error:
                place = next(place for place, token in enumerate(some) if not _is_int32(token))
                raise ValueError(f"tokens[{start + place}]={some[place]!r}: expected 32-bit integers") from error
            if start == 0 and salt:
                yield salt + packed[:size]
            for first in range(size if start == 0 and salt else 0, len(packed), size):
                yield packed[first : first + size]

    def _walk(self, parent: CachedBlock, contents: Iterable[bytes]) -> list[CachedBlock]:
        found: list[CachedBlock] = []
        for tokens in contents:
            block = self._find(parent, tokens)
            if block is None:
                break
            found.append(block)
            parent = block
        return found

    def _find(self, parent: CachedBlock, tokens: bytes) -> CachedBlock | None:
        for block in self._buckets.get(self._hash_block(parent.key, tokens), ()):
            if block.parent is parent and block.tokens == tokens:
                return block
        return None

    def _add(self, parent: CachedBlock, tokens: bytes, page: int) -> CachedBlock:
        block = CachedBlock(parent, self._hash_block(parent.key, tokens), tokens, page)
        parent.children[block] = None
        self._buckets.setdefault(block.key, []).append(block)
        self._blocks[page] = block
        return block

    def _remove(self, block: CachedBlock, unreferenced: list[int]) -> None:
        """Removes `block` and its descendants from the index; adds those of their pages that nobody references."""
        assert block.parent is not None  # the root has no page, so it is never evicted
        del block.parent.children[block]
        pending = [block]
        while pending:
            block = pending.pop()
            pending.extend(block.children)
            del self._blocks[block.page]
            bucket = self._buckets[block.key]
            if len(bucket) == 1:
                del self._buckets[block.key]
            else:
                bucket.remove(block)
            if block.page in self._evictable:
                del self._evictable[block.page]
                unreferenced.append(block.page)
