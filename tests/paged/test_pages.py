"""The page pool: counts, the free list, and what it remembers."""

import pytest

from pilotfish.paged.pages import ROOT, PagePool

COLLIDING = 2**61 - 1  # Python hashes this number like 0


def test_pages_run_out_and_come_back():
    pool = PagePool(3, 2)
    pages = [pool.allocate() for _ in range(3)]
    assert sorted(pages) == [0, 1, 2] and pool.num_free == 0 and pool.num_held == 3
    assert pool.allocate() is None
    pool.release(pages[1])
    assert pool.allocate() == pages[1]


def test_a_page_lies_behind_its_predecessor_if_it_can():
    pool = PagePool(6, 2)
    first, other = pool.allocate(), pool.allocate(after=3)
    assert other == 4
    assert pool.allocate(after=first) == first + 1
    assert pool.allocate(after=3) not in (None, 4), "taken: any other page will do"


def test_a_freed_page_can_be_found_until_it_is_handed_out():
    pool = PagePool(2, 2)
    page = pool.allocate()
    number = pool.remember(page, ROOT, [5, 6])
    pool.release(page)
    assert pool.find(ROOT, [5, 6]) == (page, number)
    pool.share(page)
    assert pool.num_held == 1
    pool.release(page)
    assert pool.allocate() != page, "what is worth remembering goes last"
    assert pool.allocate() == page
    assert pool.find(ROOT, [5, 6]) is None
    pool.check([[0], [1]])


def test_the_longest_unused_page_goes_first():
    pool = PagePool(3, 1)
    pages = [pool.allocate() for _ in range(3)]
    for page in pages:
        pool.remember(page, ROOT, [page])
    for page in (pages[1], pages[2], pages[0]):
        pool.release(page)
    pool.share(pages[1])  # used again: the longest unused is another one now
    pool.release(pages[1])
    assert [pool.allocate() for _ in range(3)] == [pages[2], pages[0], pages[1]]


def test_a_page_is_known_by_all_that_stands_before_it():
    pool = PagePool(4, 2)
    one = pool.remember(0, ROOT, [1, 1])
    two = pool.remember(1, ROOT, [2, 2])
    below_one = pool.remember(2, one, [7, 7])
    assert pool.find(one, [7, 7]) == (2, below_one)
    assert pool.find(two, [7, 7]) is None
    assert pool.find(ROOT, [7, 7]) is None


def test_the_same_content_is_known_once():
    pool = PagePool(4, 2)
    assert pool.remember(0, ROOT, [1, 2]) == pool.remember(1, ROOT, [1, 2])
    assert pool.find(ROOT, [1, 2])[0] == 0


def test_texts_with_equal_hashes_are_told_apart():
    """Also below them: a child of one must not be found under the other."""
    assert hash((ROOT, (0, 0))) == hash((ROOT, (COLLIDING, COLLIDING))), "else this test shows nothing"
    pool = PagePool(4, 2)
    one = pool.remember(0, ROOT, [0, 0])
    assert pool.find(ROOT, [COLLIDING, COLLIDING]) is None
    two = pool.remember(1, ROOT, [COLLIDING, COLLIDING])
    assert one != two
    pool.remember(2, two, [5, 6])
    assert pool.find(one, [5, 6]) is None
    assert pool.find(two, [5, 6])[0] == 2


def test_a_page_under_a_forgotten_parent_is_out_of_reach():
    """Even when another text takes the parent's page and place."""
    pool = PagePool(2, 1)
    parent, child = pool.allocate(), pool.allocate()
    number = pool.remember(parent, ROOT, [0])
    pool.remember(child, number, [9])
    pool.release(parent)
    assert pool.allocate() == parent
    again = pool.remember(parent, ROOT, [0])
    assert again != number and pool.find(again, [9]) is None


def test_forgetting_everything_leaves_holders_alone():
    pool = PagePool(2, 1)
    page = pool.allocate()
    number = pool.remember(page, ROOT, [3])
    pool.forget_all()
    assert pool.find(ROOT, [3]) is None
    assert pool.remember(page, ROOT, [3]) != number
    pool.check([[page]])


def test_releasing_a_free_page_is_our_own_mistake():
    with pytest.raises(AssertionError, match="free already"):
        PagePool(2, 1).release(0)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda pool: pool._holders.__setitem__(0, 2), "holders"),
        (lambda pool: pool._free.__setitem__(0, None), "free list"),
        (lambda pool: pool._page_of.clear(), "known prefixes"),
    ],
)
def test_check_notices_damage(damage, message: str):
    """Negative controls for the check that other tests lean on."""
    pool = PagePool(3, 1)
    page = pool.allocate()
    pool.remember(page, ROOT, [1])
    pool.check([[page]])
    damage(pool)
    with pytest.raises(AssertionError, match=message):
        pool.check([[page]])
