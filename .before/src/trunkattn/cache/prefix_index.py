"""Which page holds the KV of which prefix: a hash chain over full blocks, verified against the tokens; no torch."""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from trunkattn.cache.page_pool import check_int


@dataclass(slots=True, eq=False)  # compared by identity: a block stands for one prefix
class CachedBlock:
    """One full page in the index: the last `page_size` tokens of a prefix, and the page that holds their KV."""

    parent: "CachedBlock | None"  # None for the root, which stands for the empty prefix
    key: int  # hash of (parent.key, tokens): the hash chain
    tokens: bytes  # the page's token ids as 32-bit integers
    page: int
    children: "dict[CachedBlock, None]" = field(default_factory=dict)  # a dict, for a reproducible order


def _hash_block(parent_key: int, tokens: bytes) -> int:
    return hash((parent_key, tokens))


class PrefixIndex:
    """Maps prefixes of token ids, in whole pages, to the pages that hold their KV, for sharing between requests.

    A block's key is the hash of its parent's key and its own tokens. A key only finds candidates: a candidate is
    accepted if its parent *is* the block matched so far and its tokens are equal, so that by induction the whole
    prefix is equal, whatever the hash function returns. No hash reaches a result; nothing depends on hash order.

    **Eviction** takes the least recently used of the pages that nobody references. The caller marks a request's pages
    unreferenced last page first, so that a leaf is normally evicted before its ancestors. Only where two requests
    computed one prefix at the same time (the first one's pages are indexed, the second one's continuation hangs below
    them) can the oldest page have descendants that are in use. They leave the index with it: then every indexed
    block can be reached from the root, and every unreferenced page can be evicted, so that counting them is exact.
    Refusing to evict a block with children would give up the second property. A descendant that is referenced is
    only forgotten; it stays with the request that holds it.

    `hash_block(parent_key, tokens) -> int` can be replaced, so that collisions can be tested.
    """

    def __init__(self, page_size: int, hash_block: Callable[[int, bytes], int] = _hash_block) -> None:
        check_int("page_size", page_size, 1)
        self.page_size = page_size
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

    def match(self, tokens: Sequence[int]) -> list[int]:
        """Pages of the longest indexed prefix of `tokens`, in whole pages. Changes nothing, not even the LRU order."""
        return [block.page for block in self._walk(self.root, self._pack(tokens))]

    def block(self, page: int) -> CachedBlock:
        """The block that `page` is indexed as; KeyError if it is not."""
        return self._blocks[page]

    def is_indexed(self, block: CachedBlock) -> bool:
        """Whether `block` is still in the index, and so are its ancestors; the root always is."""
        return block is self.root or self._blocks.get(block.page) is block

    def insert(self, parent: CachedBlock, tokens: Sequence[int], pages: Sequence[int]) -> CachedBlock:
        """Index `pages`, which hold the KV of `tokens`, as the continuation of `parent`; return the last block.

        `tokens` fills the pages exactly. A block that another page is already indexed for keeps that page, and what
        follows is chained to it. New pages are referenced by someone (call `mark_unreferenced` when that ends).
        Raises ValueError, before any change, if a new page is already indexed as another prefix.
        """
        if len(tokens) != len(pages) * self.page_size:
            raise ValueError(f"tokens must fill {len(pages)} pages of {self.page_size} exactly, got {len(tokens)}")
        if not self.is_indexed(parent):
            raise ValueError(f"parent: the block of page {parent.page} is no longer in the index")
        contents = list(self._pack(tokens))
        known = self._walk(parent, contents)
        new_pages = pages[len(known) :]
        if len(set(new_pages)) != len(new_pages) or any(page in self._blocks for page in new_pages):
            raise ValueError(f"pages {list(new_pages)} must be distinct and not be indexed as another prefix")
        block = known[-1] if known else parent
        for content, page in zip(contents[len(known) :], new_pages, strict=True):
            block = self._add(block, content, page)
        return block

    def mark_referenced(self, pages: Iterable[int]) -> None:
        """Somebody references these indexed pages: they cannot be evicted."""
        for page in pages:
            self._evictable.pop(page, None)

    def mark_unreferenced(self, pages: Iterable[int]) -> None:
        """Nobody references these indexed pages any more: they become, in this order, the most recently used."""
        for page in pages:
            if page not in self._blocks:
                raise ValueError(f"pages: page {page} is not indexed")
            self._evictable[page] = None

    def evict(self, n: int) -> list[int]:
        """Drop the `n` least recently used unreferenced pages and their descendants; return those now unused.

        At least `n` pages come back: unreferenced descendants are among them. Raises ValueError if fewer than `n`
        pages are evictable.
        """
        check_int("n", n, 0)
        if n > len(self._evictable):
            raise ValueError(f"n must be at most num_evictable = {len(self._evictable)}, got {n}")
        evicted: list[int] = []
        while len(evicted) < n:
            oldest = next(iter(self._evictable))
            evicted.extend(self._remove(self._blocks[oldest]))
        return evicted

    def clear(self) -> list[int]:
        """Forget every prefix; return the pages that nobody references."""
        unreferenced = self.evictable_pages()
        self.root.children.clear()
        self._buckets.clear()
        self._blocks.clear()
        self._evictable.clear()
        return unreferenced

    def check_integrity(self) -> None:
        """Raise RuntimeError unless tree, hash buckets, page map and LRU order agree. Linear in the indexed pages."""
        reached = list(self.root.children)
        for block in reached:
            reached.extend(block.children)
            parent = block.parent
            if parent is None or block not in parent.children or self._blocks.get(block.page) is not block:
                raise RuntimeError(f"page {block.page} is not linked with its parent or the page map")
            if len(block.tokens) != self.page_size * array("i").itemsize:
                raise RuntimeError(f"page {block.page} is indexed with a partial block")
            if block.key != self._hash_block(parent.key, block.tokens) or block not in self._buckets[block.key]:
                raise RuntimeError(f"page {block.page} is not in the bucket of its key")
            if self._find(parent, block.tokens) is not block:
                raise RuntimeError(f"page {block.page} is indexed for a prefix that another page is indexed for")
        if len(reached) != len(self._blocks):
            raise RuntimeError("an indexed page cannot be reached from the root")
        if sum(map(len, self._buckets.values())) != len(self._blocks) or not all(self._buckets.values()):
            raise RuntimeError("the hash buckets hold a block that is not in the index, or are empty")
        if not self._evictable.keys() <= self._blocks.keys():
            raise RuntimeError("the LRU order holds a page that is not indexed")

    def _pack(self, tokens: Sequence[int]) -> Iterator[bytes]:
        """The full blocks of `tokens`, one at a time: a match that fails early has not read the rest."""
        for start in range(0, len(tokens) - self.page_size + 1, self.page_size):
            block = tokens[start : start + self.page_size]
            try:
                yield array("i", block).tobytes()
            except (TypeError, OverflowError) as error:
                raise ValueError(f"tokens must be 32-bit integers, got {block!r} at {start}") from error

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

    def _remove(self, block: CachedBlock) -> list[int]:
        """Take `block` and its descendants out of the index; return the pages among them that nobody references."""
        assert block.parent is not None  # the root has no page, so nobody evicts it
        del block.parent.children[block]
        unreferenced = []
        pending = [block]
        while pending:
            block = pending.pop()
            pending.extend(block.children)
            del self._blocks[block.page]
            bucket = self._buckets[block.key]
            bucket.remove(block)
            if not bucket:
                del self._buckets[block.key]
            if block.page in self._evictable:
                del self._evictable[block.page]
                unreferenced.append(block.page)
        return unreferenced
