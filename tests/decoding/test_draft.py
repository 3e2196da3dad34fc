"""Draft: parent form, and what can be read off it."""

import pytest
import torch

from pilotfish.decoding.draft import EMPTY, MAX_NODES, Draft, accepted_nodes, ancestors, chain

# pending ── 0 ── 1 ── 3
#         └── 2
TREE = Draft((10, 11, 12, 13), (-1, 0, -1, 1))


def test_a_chain_is_the_tree_with_consecutive_parents():
    draft = chain([7, 7, 8])
    assert draft.tokens == (7, 7, 8)  # a token may follow itself
    assert draft.parents == (-1, 0, 1)
    assert draft.is_chain
    assert len(draft) == 3
    assert not TREE.is_chain


def test_an_empty_draft_is_a_chain_of_nothing():
    for draft in (EMPTY, chain([]), Draft(), TREE.first(0)):
        assert len(draft) == 0
        assert draft.is_chain
        assert draft.paths() == []
        assert draft.children() == [[]]
        assert ancestors(draft.parents) == ()


def test_children_in_order_with_the_pending_tokens_last():
    assert TREE.children() == [[1], [3], [], [], [0, 2]]
    assert TREE.children()[-1] == [0, 2]


def test_paths_lead_from_the_root_to_each_node():
    assert TREE.paths() == [(10,), (10, 11), (12,), (10, 11, 13)]


def test_ancestors_are_bit_sets_with_the_node_itself():
    assert ancestors(TREE.parents) == (0b0001, 0b0011, 0b0100, 0b1011)
    assert ancestors(chain(range(63)).parents)[-1] == 2**63 - 1


def test_ancestors_agree_with_paths_on_random_trees():
    generator = torch.Generator().manual_seed(0)
    for num_nodes in range(1, MAX_NODES + 1):
        parents = tuple(int(torch.randint(-1, i, (1,), generator=generator)) if i else -1 for i in range(num_nodes))
        draft = Draft(tuple(range(num_nodes)), parents)
        for path, word in zip(draft.paths(), ancestors(parents), strict=True):
            assert word == sum(1 << node for node in path)  # node i carries token i here
        assert sorted(node for nodes in draft.children() for node in nodes) == list(range(num_nodes))


def test_first_cuts_by_position_and_takes_the_laws_along():
    probs = torch.rand(4, 20)
    draft = Draft(TREE.tokens, TREE.parents, probs)
    cut = draft.first(3)
    assert (cut.tokens, cut.parents) == ((10, 11, 12), (-1, 0, -1))
    assert torch.equal(cut.probs, probs[:3])
    assert draft.first(4) is draft
    assert draft.first(99) is draft
    assert TREE.first(2).is_chain


@pytest.mark.parametrize(
    ("tokens", "parents", "probs"),
    [
        ((1, 2), (-1,), None),  # a parent too few
        ((1, 2), (-1, 1), None),  # its own parent
        ((1, 2), (1, -1), None),  # a parent that comes later
        ((1, 2), (-1, -2), None),  # no such node
        ((1, 1), (-1, -1), None),  # siblings alike
        ((1, 2, 3, 2), (-1, 0, -1, 0), None),  # siblings alike further down
        ((1, 2), (-1, 0), torch.rand(1, 5)),  # a law too few
        (tuple(range(64)), tuple(range(-1, 63)), None),  # one node more than a word has bits
    ],
)
def test_what_is_not_a_tree_is_our_own_mistake(tokens, parents, probs):
    with pytest.raises(AssertionError):
        Draft(tokens, parents, probs)


def test_a_draft_is_a_value_that_does_not_change():
    with pytest.raises(AttributeError):
        TREE.tokens = ()
    assert chain([1]) != chain([1])  # tensors have no truth: drafts are compared by identity


def test_accepted_nodes_are_read_off_the_tokens():
    tree = Draft((5, 6, 7, 5, 7), (-1, -1, 1, 1, 3))
    assert accepted_nodes(tree, ()) == set()
    assert accepted_nodes(tree, (5,)) == {0}
    assert accepted_nodes(tree, (6, 5, 7)) == {1, 3, 4}
