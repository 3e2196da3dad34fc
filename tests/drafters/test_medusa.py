"""Drafting with Medusa's heads: what they are about, which nodes are handed out, and odd trees."""

import json
import math
from typing import Any

import pytest
import torch

from pilotfish.decoding.draft import MAX_NODES
from pilotfish.decoding.sampling import SamplingParams
from pilotfish.drafters import registry
from pilotfish.drafters.medusa import MedusaDrafter, MedusaOptions, default_tree
from pilotfish.errors import DraftError, OptionError
from pilotfish.heads.medusa import MedusaConfig, MedusaHeads
from tests.adversaries import untrained_head
from tests.fakes import TableModel, drain, engine, oracle

NUM_IDS = 8
TARGET = TableModel(NUM_IDS, order=2, num_phases=3, sharpness=1.5)
PROMPT = [1, 2, 3, 4, 5, 6, 7, 1, 3]


class OracleHeads:
    """Knows the text to come: head k, given the state of place t, says what stands at t + 2 + k, all but surely."""

    def __init__(self, texts: list[list[int]], num_heads: int = 4, *, late: int = 0):
        self.texts, self.late = texts, late
        self.config = MedusaConfig(hidden_size=2, vocab_size=NUM_IDS, draft_vocab_size=NUM_IDS, num_heads=num_heads)

    def target_ids(self) -> torch.Tensor:
        return torch.arange(NUM_IDS)

    def __call__(self, states_TD: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(self.config.num_heads, len(states_TD), NUM_IDS)
        for row, (token, place) in enumerate(states_TD.long().tolist()):
            (text,) = [text for text in self.texts if len(text) > place and text[place] == token]
            for head in range(self.config.num_heads):
                about = place + 2 + head + self.late
                if about < len(text):
                    logits[head, row, text[about]] = 9.0
        return logits


def greedy(max_tokens: int = 20) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens)


def drafting(heads: Any, *, paths: Any = None, k: int = 4, **more: Any) -> Any:
    return engine(TARGET, lambda setting: MedusaDrafter(heads, TARGET.ends(), setting, paths), k=k, **more)


def text_of(prompt: list[int], max_tokens: int = 20) -> list[int]:
    return [*prompt, *oracle(TARGET.logits_of, prompt, greedy(max_tokens))]


@pytest.mark.parametrize("rows", [16, 2048])
def test_a_head_is_about_the_token_two_and_its_number_behind_its_state(rows):
    found = drafting(
        OracleHeads([text_of(PROMPT)]), paths=[(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)], max_num_batched_tokens=rows
    )
    (request,) = found.add(PROMPT, greedy())
    drain(found)
    assert found.num_failed_drafts == 0 and request.tokens == text_of(PROMPT)
    assert request.stats.per_step_accepted == request.stats.per_step_drafted == [4, 4, 4, 3]


@pytest.mark.parametrize("late", [-1, 1])
def test_off_by_one_it_is_mostly_wrong(late):
    """The control of the one above."""
    found = drafting(OracleHeads([text_of(PROMPT)], late=late))
    (request,) = found.add(PROMPT, greedy())
    drain(found)
    assert request.tokens == text_of(PROMPT)
    assert request.stats.per_step_accepted[:2] == [0, 0]  # later on, the text repeats itself


def test_a_batch_with_preemption_keeps_states_apart():
    prompts = [[n, *PROMPT] for n in range(6)]
    texts = [text_of(prompt, 14) for prompt in prompts]

    class Apart(OracleHeads):
        def __call__(self, states_TD):
            assert len(states_TD) == len(asked), "a state per request"
            rows = []
            for request, (token, place) in zip(asked, states_TD.long().tolist(), strict=True):
                assert request.tokens[place] == token and place == len(request.tokens) - 2
                self.texts = [texts[int(request.prompt[0])]]
                rows.append(super().__call__(torch.tensor([[token, place]])))
            return torch.cat(rows, dim=1)

    found = drafting(Apart([]), paths=[(0,), (0, 0), (0, 0, 0)], num_pages=16, max_num_seqs=4, k=3)
    asked: list[Any] = []
    propose = found.drafter.propose

    def ask(requests, limits):
        states = found.drafter._states
        asked[:] = [r for r in requests if states.get(r.id, (-1,))[0] == len(r.tokens) - 2]
        return propose(requests, limits)

    found.drafter.propose = ask
    requests = [found.add(prompt, greedy(14))[0] for prompt in prompts]
    drain(found)
    assert found.num_failed_drafts == 0 and found.scheduler.num_preemptions > 0
    assert [request.tokens for request in requests] == texts
    assert all(r.stats.per_step_accepted == r.stats.per_step_drafted != [] for r in requests)


def test_the_likeliest_nodes_of_the_tree_are_handed_out():
    """Against brute force over the tree, for any limit."""
    head = untrained_head("medusa", 2, NUM_IDS, 2)
    found = drafting(head, k=MAX_NODES)
    drafter = found.drafter
    (request,) = found.add(PROMPT, greedy())
    found.step()
    _, state_D = drafter._states[request.id]
    with torch.no_grad():
        laws = head(state_D.float()[None])[:, 0].log_softmax(1)
    ranked = laws.argsort(dim=1, descending=True).tolist()
    values = {}
    for path in drafter.tree(greedy=True):
        tokens = tuple(ranked[depth][rank] for depth, rank in enumerate(path))
        values[tokens] = sum(float(laws[depth, token]) for depth, token in enumerate(tokens))
    best = sorted(values, key=lambda tokens: -values[tokens])
    for limit in (1, 3, 10, 30, MAX_NODES):
        (draft,) = drafter.propose([request], [limit])
        assert draft.probs is None and set(draft.paths()) == set(best[:limit])
        assert draft.paths() == drafter.propose([request], [MAX_NODES])[0].paths()[:limit], "the best come first"


def test_the_default_tree_is_the_best_by_its_own_shares():
    tree = default_tree(4)
    assert len(tree) == len(set(tree)) == MAX_NODES and tree[0] == (0,)
    assert all(path[:-1] in tree[:place] for place, path in enumerate(tree) if len(path) > 1)
    assert max(map(len, tree)) == 4 and max(map(max, tree)) >= 5
    assert len(default_tree(1)) == 10


def test_chances_are_the_probabilities_of_paths_and_never_rise():
    found = drafting(untrained_head("medusa", 2, NUM_IDS, 2), k=40)
    (request,) = found.add(PROMPT, greedy())
    found.step()
    (draft,) = found.drafter.propose([request], [40])
    assert all(
        parent < 0 or draft.chances[parent] >= own for parent, own in zip(draft.parents, draft.chances, strict=True)
    )
    assert list(draft.chances) == sorted(draft.chances, reverse=True)
    _, state_D = found.drafter._states[request.id]
    with torch.no_grad():
        laws = found.drafter.heads(state_D.float()[None])[:, 0].softmax(1)
    for path, chance in zip(draft.paths(), draft.chances, strict=True):
        assert chance == pytest.approx(math.prod(float(laws[i, token]) for i, token in enumerate(path)), rel=1e-4)


class Second(OracleHeads):
    """As the oracle, but for one id that it likes better still: its second guess is the right one."""

    def __call__(self, states_TD: torch.Tensor) -> torch.Tensor:
        logits = super().__call__(states_TD)
        right = logits.argmax(2, keepdim=True)
        return logits.scatter(2, (right + 1) % NUM_IDS, 9.5)


def test_ranks_that_are_right_get_more_of_the_tree():
    heads = Second([])
    found = drafting(heads, k=12)
    drafter = found.drafter
    before = list(drafter.tree(greedy=True))
    for n in range(7):
        heads.texts = [text_of([n, *PROMPT], 60)]
        found.add([n, *PROMPT], greedy(60))
        drain(found)
    assert found.num_failed_drafts == 0
    for level in drafter.ranks[True].rates()[:2]:
        assert level[0] < 0.2 and level[1] > 0.8
    assert not any(map(any, drafter.ranks[False].tries)), "nobody drew"
    tree = list(drafter.tree(greedy=True))
    assert (1, 1, 1, 1) in tree[:12] and (1, 1, 1, 1) not in before[:12]


def test_a_given_tree_stays():
    found = drafting(Second([text_of(PROMPT)]), paths=[(0,), (1,), (1, 1)])
    found.add(PROMPT, greedy())
    drain(found)
    for _ in range(64):
        found.drafter.ranks[True].count()
    assert list(found.drafter.tree(greedy=True)) == [(0,), (1,), (1, 1)]


def test_chains_where_drafts_may_not_branch():
    found = drafting(OracleHeads([text_of(PROMPT)]), rule="block")
    (request,) = found.add(PROMPT, greedy())
    drain(found)
    assert not found.drafter.trees and request.stats.per_step_accepted == [4, 4, 4, 3]


def test_a_tree_from_a_file(tmp_path):
    path = tmp_path / "tree.json"
    path.write_text(json.dumps([[0, 0], [0], [1], [0, 1]]))
    options = MedusaOptions(tree=str(path))
    assert options.paths == [(0,), (1,), (0, 0), (0, 1)]
    config = {"method": "medusa", "model": untrained_head("medusa", 2, NUM_IDS, 2), "tree": str(path)}
    found = engine(TARGET, registry.parse(config).build, k=MAX_NODES)
    (request,) = found.add(PROMPT, greedy(8))
    drain(found)
    assert found.num_failed_drafts == 0 and request.stats.per_step_drafted[0] == 4


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ([[0, 0]], "without \\[0\\]"),
        ([[0], "1"], "not '1'"),
        ([[0], [-1]], "ranks"),
        ([[0], []], "ranks"),
        ([], "list of paths"),
        (7, "list of paths"),
        ([[i] for i in range(64)], "64 nodes"),
    ],
)
def test_odd_trees_are_refused(tree, words):
    with pytest.raises(OptionError, match=words):
        MedusaOptions(tree=tree)


def test_files_that_are_no_trees_are_named(tmp_path):
    with pytest.raises(OptionError, match="tree.json cannot be read"):
        MedusaOptions(tree=str(tmp_path / "tree.json"))
    (tmp_path / "tree.json").write_text("[[0]")
    with pytest.raises(OptionError, match="tree.json is not JSON"):
        MedusaOptions(tree=str(tmp_path / "tree.json"))


def test_what_does_not_fit_is_refused():
    head = untrained_head("medusa", 2, NUM_IDS, 2)
    with pytest.raises(DraftError, match="paths of 4 guesses, and there are 3 heads"):
        drafting(head, paths=[(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)])
    with pytest.raises(DraftError, match="--draft-model"):
        engine(TARGET, registry.parse({"method": "medusa"}).build)
    with pytest.raises(DraftError, match="for method 'eagle3', not 'medusa'"):
        engine(TARGET, registry.parse({"method": "medusa", "model": untrained_head("eagle3", 2, NUM_IDS, 2)}).build)


def test_states_that_are_not_numbers_cost_drafts_and_no_request():
    head: Any = MedusaHeads(
        MedusaConfig(hidden_size=2, vocab_size=8, draft_vocab_size=8), torch.full((8, 2), torch.nan)
    )
    found = drafting(head)
    (request,) = found.add(PROMPT, greedy(8))
    drain(found)
    assert found.num_failed_drafts == 0 and request.tokens == text_of(PROMPT, 8) and not request.stats.per_step_drafted
