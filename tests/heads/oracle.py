"""A head that reads the whole text back out of what it is given, and says what the target says: right, or loudly wrong.

It stands for `Eagle3Head`. Its states are texts (index p holds the token of place p, plus one; 0 where nothing is
known), so any row, position, page or ancestor that is off by one gives another text, and other guesses. The one trick:
with queries of nothing attention is the mean of what a row sees, so a mean of one-hot values is the text.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from pilotfish.heads.eagle3 import Eagle3Config
from tests.fakes import TableModel

CONTEXT = 64


class OracleHead:
    """strict: every row must see all places before its own; else what is missing is taken for token 0."""

    def __init__(self, target: TableModel, *, draft_ids: list[int] | None = None, strict: bool = True):
        ids = list(range(target.info.vocab_size)) if draft_ids is None else draft_ids
        self.target, self.ids, self.strict, self.num_texts = target, ids, strict, 0
        self.config = Eagle3Config(
            hidden_size=CONTEXT,
            intermediate_size=1,
            num_heads=1,
            num_key_heads=1,
            head_dim=2 * CONTEXT,
            vocab_size=target.info.vocab_size,
            draft_vocab_size=len(ids),
            taps=(0, 0, 1),
        )

    def target_ids(self) -> Tensor:
        return torch.tensor(self.ids)

    def fuse(self, taps_T3D: Tensor) -> Tensor:
        """The target's states are (token, position); see `TableModel.forward`."""
        return _one_hot(taps_T3D[:, 0], taps_T3D[:, 1])

    def forward(
        self, tokens_T: Tensor, hidden_TD: Tensor, positions_T: Tensor, attend: Callable[..., Tensor]
    ) -> Tensor:
        known = [int(row.nonzero()[-1]) for row in hidden_TD]
        assert known == positions_T.tolist(), "a state belongs to its row's own place"
        own_TD = hidden_TD[range(len(known)), known]
        values_T2D = torch.cat([_one_hot(own_TD - 1, positions_T), _one_hot(tokens_T, positions_T + 1)], 1)
        nothing_THD = torch.zeros(len(tokens_T), 1, 2 * CONTEXT)
        mean_TD = attend(nothing_THD, nothing_THD, values_T2D[:, None])[:, 0]
        before_TD, after_TD = mean_TD.split(CONTEXT, dim=1)
        texts = []
        for place, before, after in zip(positions_T.tolist(), before_TD, after_TD, strict=True):
            count = int((after > 0).sum())  # of rows, if none is seen twice
            held, text = before * count, after * count
            assert torch.allclose(held, held.round(), atol=1e-3) and torch.allclose(text, text.round(), atol=1e-3)
            held, text = held.round(), text.round()
            both = (held > 0) & (text > 0)
            assert torch.equal(held[both], text[both]), "the state of place i joins token i + 1"
            text = torch.maximum(held, text)
            assert not bool((text[place + 2 :] > 0).any()), "it sees nothing ahead"
            assert not self.strict or bool((text[: place + 2] > 0).all()), "it sees all that is behind"
            texts.append(text)
        return torch.stack(texts)

    __call__ = forward

    def logits(self, hidden_TD: Tensor) -> Tensor:
        self.num_texts += len(hidden_TD)
        rows = []
        for text in hidden_TD:
            known = text[: int(text.nonzero()[-1]) + 1].long() - 1
            rows.append(self.target.logits_of(known.clamp(min=0).tolist())[self.ids])
        return torch.stack(rows).float()


def _one_hot(tokens_T: Tensor, positions_T: Tensor) -> Tensor:
    rows = torch.zeros(len(tokens_T), CONTEXT)
    rows[torch.arange(len(tokens_T)), positions_T.long()] = tokens_T.float() + 1
    return rows
