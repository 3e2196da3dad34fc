"""An auditor: from a trace record, the text before it and the exact table, is this the verdict that the rule gives?

It knows the noise and the laws, and nothing of the code that judged or listened: the rules are written down once more
here, naively, with whole laws. Whatever a record says is held against that.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from pilotfish.decoding.noise import Lane, exponentials, uniform
from tests.fakes import TableModel

Law = Callable[[Sequence[int]], Tensor]  # of the next token behind a text, [V]


def audit(one: dict[str, Any], text: Sequence[int], model: TableModel, q: Law | None = None) -> None:
    """Raises an AssertionError for whatever is not so. q: the law that drafts were drawn from, before their siblings
    were taken out; None: they were chosen."""
    _Audit(one, text, model, q).run()


class _Audit:
    def __init__(self, one: dict[str, Any], text: Sequence[int], model: TableModel, q: Law | None):
        self.one, self.text, self.q = one, list(text), q
        self.ids = [node["id"] for node in one["nodes"]]
        self.parents = list(one["draft"]["parents"]) if one["draft"] else []
        self.law = lambda tokens: model.law([*text, *tokens], one["temperature"] or 1.0)
        assert one["position"] == len(text)

    def run(self) -> None:
        for node, said in enumerate(self.one["nodes"]):
            before = self.tokens_to(self.parents[node])
            assert said["p"] == close(self.law(before)[said["id"]])
            assert said["q"] == close(self.q_of(node)[said["id"]])
        self.trials = iter(self.one["trials"])
        rule = {"rejection": self.rejection, "block": self.block, "coupled": self.coupled, "greedy": self.greedy}
        path, token = rule[self.one["rule"]]()
        assert next(self.trials, None) is None, "a trial that nobody held"
        assert (list(self.one["path"]), self.one["last"]["token"][0]) == (path, token)
        given = [*(self.ids[node] for node in path), token]
        assert list(self.one["ids"]) == given[: len(self.one["ids"])]
        assert self.one["last"]["p"] == close(self.law(given[:-1])[token])
        for depth, row in enumerate(self.one["rows"]):
            assert row["after"] == [-1, *path][depth]
            same_top(row["top"], self.law(given[:depth]))
        assert len(self.one["rows"]) == len(path) + 1
        has_children = any(parent == ([-1, *path][-1]) for parent in self.parents)
        otherwise = "residual" if self.one["rule"] in ("rejection", "block") else "choice"
        kind = "plain" if not self.ids else otherwise if has_children else "bonus"
        assert self.one["last"]["kind"] == kind

    def tokens_to(self, node: int) -> list[int]:
        return [] if node < 0 else [*self.tokens_to(self.parents[node]), self.ids[node]]

    def children(self, node: int) -> list[int]:
        return [child for child, parent in enumerate(self.parents) if parent == node]

    def q_of(self, node: int) -> Tensor:
        """The law that this node's token was drawn from."""
        law_V = torch.zeros(len(self.law([])), dtype=torch.float64)
        if self.q is None:
            law_V[self.ids[node]] = 1
            return law_V
        law_V = self.q([*self.text, *self.tokens_to(self.parents[node])]).clone()
        for other in self.children(self.parents[node]):
            if other < node:
                law_V[self.ids[other]] = 0
        return law_V / law_V.sum()

    def coin(self, depth: int, sibling: int) -> float:
        return uniform(self.one["seed"], self.one["position"], Lane.ACCEPT, depth << 16 | sibling)

    def drawn(self, depth: int, weights_V: Tensor) -> int:
        """The last token: the uniform lies in its slice, and the law is the one that is said."""
        last, law_V = self.one["last"], weights_V / weights_V.sum()
        u = uniform(self.one["seed"], self.one["position"], Lane.RESIDUAL, depth << 16)
        token = int((law_V.cumsum(0) > u).nonzero()[0])
        assert last["u"] == u and last["low"] <= u < last["high"]
        assert last["low"] == pytest.approx(float(law_V[:token].sum()), abs=1e-9)
        assert last["high"] == pytest.approx(float(law_V[: token + 1].sum()), abs=1e-9)
        same_top(last["top"], law_V)
        return token

    def rejection(self) -> tuple[list[int], int]:
        node, path = -1, list[int]()
        while True:
            left_V, accepted = self.law(self.tokens_to(node)), None
            for sibling, child in enumerate(self.children(node)):
                trial, q_V = next(self.trials), self.q_of(child)
                assert trial["node"] == child
                chance = float(left_V[self.ids[child]] / q_V[self.ids[child]])
                assert trial["threshold"] == close(chance)
                assert trial["left"] == close(left_V[self.ids[child]])
                if chance > 0:
                    assert trial["u"] == self.coin(len(path), sibling)
                passes = chance > 0 and trial["u"] < chance
                assert trial["passed"] == passes
                if passes:
                    accepted = child
                    break
                left_V = (left_V - q_V).clamp(min=0)
                left_V = left_V / left_V.sum()
            if accepted is None:
                return path, self.drawn(len(path), left_V)
            path.append(accepted)
            node = accepted

    def block(self) -> tuple[list[int], int]:
        weight, kept, num = 1.0, 0, len(self.ids)
        weights = [weight]
        for node in range(num):
            p_V, q_V = self.law(self.ids[:node]), self.q_of(node)
            weight = min(1.0, weight * float(p_V[self.ids[node]] / q_V[self.ids[node]]))
            weights.append(weight)
            threshold = weight
            if node + 1 < num:
                after_V, next_V = self.law(self.ids[: node + 1]), self.q_of(node + 1)
                mass = float((weight * after_V - next_V).clamp(min=0).sum())
                threshold = mass / (mass + 1 - weight)
            trial = next(self.trials)
            assert (trial["node"], trial["u"]) == (node, self.coin(node, 0))
            assert trial["weight"] == close(weight) and trial["threshold"] == close(threshold)
            assert trial["passed"] == (trial["u"] < threshold)
            kept = node + 1 if trial["passed"] else kept
        left_V = self.law(self.ids[:kept])
        if kept < num:
            left_V = (weights[kept] * left_V - self.q_of(kept)).clamp(min=0)
        return list(range(kept)), self.drawn(kept, left_V)

    def coupled(self) -> tuple[list[int], int]:
        def scores(depth: int, p_V: Tensor) -> Tensor:
            return p_V / exponentials(self.one["seed"], self.one["position"] + depth, len(p_V))

        return self.walk(scores)

    def greedy(self) -> tuple[list[int], int]:
        return self.walk(lambda _depth, p_V: p_V)

    def walk(self, scores: Callable[[int, Tensor], Tensor]) -> tuple[list[int], int]:
        node, path = -1, list[int]()
        while True:
            score_V = scores(len(path), self.law(self.tokens_to(node)))
            choice, row = int(score_V.argmax()), self.one["rows"][len(path)]
            assert row["choice"][0] == choice
            if self.one["rule"] == "coupled":
                assert row["score"] == close(score_V[choice])
            accepted = None
            for child in self.children(node):
                trial = next(self.trials)
                assert trial["node"] == child
                if self.one["rule"] == "coupled":
                    assert trial["score"] == close(score_V[self.ids[child]])
                    assert trial["passed"] == (trial["score"] >= row["score"])
                assert trial["passed"] == (self.ids[child] == choice)
                if trial["passed"]:
                    accepted = child
                    break
            if accepted is None:
                return path, choice
            path.append(accepted)
            node = accepted


def close(value: Any) -> Any:
    return pytest.approx(float(value), rel=1e-9, abs=1e-12)


def same_top(top: Sequence[Any], law_V: Tensor) -> None:
    assert [p for _, _, p in top] == pytest.approx(law_V.topk(len(top)).values.tolist(), abs=1e-9)
    assert [p for _, _, p in top] == pytest.approx([float(law_V[id]) for id, _, _ in top], abs=1e-9)
