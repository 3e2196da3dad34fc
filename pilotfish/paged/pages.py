"""PagePool: who holds which page. Host-side bookkeeping only: reference counts, a free list, known prefixes.

It does not know tensors, models or requests. The one trick: a page whose prefix is known stays findable after its last
holder let go, until it is handed out again; the free list hands out the longest unused first.

A full page of committed tokens is known by (its parent's number, its tokens). Numbers are given out once and never
again, and the dict compares what it finds: no collision of hashes can put one text's keys under another. The parent of
a text's first page is ROOT, or what its keys depend on too: the source that the text was written from, and before that
the adapter that makes it, if there are such.
"""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import count

ROOT = 0  # the number that stands before the first page

Origin = tuple[int | str, ...]  # an adapter's name, if there is one; the ids (or the digest) of the source, if any
Parent = int | Origin  # a page's number, or what stands before the first one


class PagePool:
    """num_pages pages of page_size rows each. Raises nothing of its own: `allocate` returns None when out of pages."""

    def __init__(self, num_pages: int, page_size: int):
        assert num_pages > 0 and page_size > 0, (num_pages, page_size)
        self.num_pages, self.page_size = num_pages, page_size
        self._holders = [0] * num_pages
        self._free = OrderedDict.fromkeys(range(num_pages))  # oldest first; known pages in it can be revived
        self._numbers = count(ROOT + 1)
        self._page_of: dict[tuple[Parent, tuple[int, ...]], int] = {}  # parent, tokens -> page
        self._content: dict[int, tuple[int, tuple[Parent, tuple[int, ...]]]] = {}  # page -> own number, key in _page_of

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        return self.num_pages - len(self._free)

    def allocate(self, after: int | None = None) -> int | None:
        """A page of one's own; the one right behind ``after`` if it is free, so that keys can be read as one view."""
        if not self._free:
            return None
        page = -1 if after is None else after + 1
        if page in self._free and page not in self._content:
            del self._free[page]
        else:
            page, _ = self._free.popitem(last=False)
        self._forget(page)
        self._holders[page] = 1
        return page

    def share(self, page: int) -> None:
        """One more holder."""
        if self._holders[page] == 0:
            del self._free[page]
        self._holders[page] += 1

    def release(self, page: int) -> None:
        """One holder less; the last one frees the page, content and prefix kept for whoever comes first."""
        assert self._holders[page] > 0, f"page {page} is free already"
        self._holders[page] -= 1
        if self._holders[page] == 0:
            self._free[page] = None
            if page not in self._content:
                self._free.move_to_end(page, last=False)  # nothing to remember: hand it out first

    def remember(self, page: int, parent: Parent, tokens: Sequence[int]) -> int:
        """Make a full, committed page findable; returns its number, the parent of the next page's."""
        assert len(tokens) == self.page_size
        key = parent, tuple(tokens)
        if key not in self._page_of:  # else the same content is known under another page: that one stays
            self._page_of[key] = page
            self._content[page] = next(self._numbers), key
        return self._content[self._page_of[key]][0]

    def find(self, parent: Parent, tokens: Sequence[int]) -> tuple[int, int] | None:
        """(page, its number) of a remembered page with this parent and these very tokens, or None."""
        page = self._page_of.get((parent, tuple(tokens)))
        return None if page is None else (page, self._content[page][0])

    def forget_all(self) -> None:
        """Drop every prefix (the weights changed, or a test wants a cold cache)."""
        self._page_of.clear()
        self._content.clear()

    def check(self, held: Sequence[Sequence[int]]) -> None:
        """Integrity: ``held`` is every sequence's page list. AssertionError names what does not add up."""
        counts = [0] * self.num_pages
        for pages in held:
            assert len(set(pages)) == len(pages), f"a page twice in one sequence: {pages}"
            for page in pages:
                counts[page] += 1
        assert counts == self._holders, "holders do not match the sequences' pages"
        assert all((count == 0) == (page in self._free) for page, count in enumerate(counts)), "free list"
        for key, page in self._page_of.items():
            assert self._content[page][1] == key, f"page {page} is known under two prefixes"
        assert len(self._content) == len(self._page_of), "known prefixes"

    def _forget(self, page: int) -> None:
        content = self._content.pop(page, None)
        if content is not None:
            del self._page_of[content[1]]
