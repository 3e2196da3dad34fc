"""Trained heads that each guess one token further ahead from the target's last state (Cai et al. 2024, 2401.10774).

It does not know the target's layers; the last one's output comes to it after every pass. No head sees what another
guessed, so one pass of small matrices is the whole of drafting. The one trick: what is lost by that is won back by
branching. A tree of ranks says which guesses are worth combining (the second-best of head 1 behind the best of head 0,
...), and of its nodes those with the likeliest paths are handed out.

Every guess is judged exactly, as any other: Medusa's "typical acceptance", which changes the text, does not exist here.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..decoding.draft import EMPTY, MAX_NODES, Draft
from ..decoding.request import Request, Step
from ..errors import DraftError, OptionError
from ..lazily import torch
from ..models.options import QUANTIZATIONS
from .base import Drafter, Setting
from .growing import confidence
from .states import kept_rows

if TYPE_CHECKING:
    from torch import Tensor

    from ..heads.medusa import MedusaHeads
    from ..models.base import Ends

# How often the guess of each rank was right, as a share of the first one's, and how the first one's falls from head to
# head: what the trees that come with Medusa's own weights imply, roughly. It only ranks nodes.
_BY_RANK = (1.0, 0.27, 0.13, 0.09, 0.065, 0.05, 0.04, 0.033, 0.028, 0.024)
_BY_HEAD = (0.6, 0.45, 0.35, 0.28, 0.23)


@dataclass(frozen=True, slots=True)
class MedusaOptions:
    """Raises OptionError for values out of range, and for what is no tree."""

    model: Any = field(default=None, metadata={"help": "the folder of the heads", "flag": "draft_model"})
    quantization: Literal["auto", "none", "int8", "int4"] = field(
        default="auto", metadata={"help": "weights of the heads; auto: int8 on a CPU", "flag": "draft_quantization"}
    )
    tree: Any = field(
        default=None,
        metadata={"help": "medusa: a JSON file with a list of paths of ranks, such as [[0], [1], [0, 0]]"},
    )

    def __post_init__(self) -> None:
        if self.quantization not in ("auto", *QUANTIZATIONS):
            raise OptionError(f"quantization must be auto, {', '.join(QUANTIZATIONS)}, not {self.quantization!r}")
        self.paths  # noqa: B018 -- raises if it is no tree

    @property
    def paths(self) -> list[tuple[int, ...]] | None:
        """The tree that was given: paths of ranks, each behind its beginning; None for the default."""
        if self.tree is None:
            return None
        given, source = self.tree, "tree"
        if isinstance(given, str | Path):
            source = str(given)
            try:
                given = json.loads(Path(given).expanduser().read_text(encoding="utf-8"))
            except OSError as error:
                raise OptionError(f"the tree {source} cannot be read: {error.strerror}") from error
            except ValueError as error:
                raise OptionError(f"the tree {source} is not JSON: {error}") from error
        return _checked(given, source)


class MedusaDrafter(Drafter):
    """heads: in float32, on the target's device. ends: the target's. paths: the tree; the default one if None."""

    Options = MedusaOptions

    def __init__(
        self, heads: MedusaHeads, ends: Ends, setting: Setting, paths: Sequence[tuple[int, ...]] | None = None
    ):
        self.heads, self.norm, self.target_cache = heads, ends.norm, setting.cache
        self.device, self.last_layer = setting.target.device, len(setting.target.layers) - 1
        self.taps = (self.last_layer,)
        self.trees = setting.trees
        self.target_ids = heads.target_ids().to(self.device)
        num_heads, num_ids = heads.config.num_heads, heads.config.draft_vocab_size
        if paths is None:
            paths = default_tree(num_heads)
        elif max(map(len, paths)) > num_heads:
            raise DraftError(f"the tree has paths of {max(map(len, paths))} guesses, and there are {num_heads} heads")
        if not self.trees:
            paths = [(0,) * (depth + 1) for depth in range(num_heads)]
        self.paths = [path for path in paths if max(path) < num_ids]
        self.num_ranks = 1 + max(max(path) for path in self.paths)
        self._states: dict[str, tuple[int, Tensor]] = {}  # the last state that was seen, and its place

    @classmethod
    def build(cls, options: Any, setting: Setting) -> MedusaDrafter:
        from ..heads.layers import placed
        from ..heads.medusa import MedusaHeads
        from ..heads.store import load_for

        heads = load_for(options.model, setting.model, setting.tokenizer, "medusa")
        assert isinstance(heads, MedusaHeads)
        placed(heads, options.quantization, setting.device)
        return cls(heads, setting.model.ends(), setting, options.paths)

    def describe(self) -> str:
        return f"{self.heads.config.num_heads} heads, a tree of {len(self.paths)} nodes"

    def observe(self, steps: Sequence[Step], taps: Mapping[int, Tensor]) -> None:
        last = [
            (request, past + len(kept) - 1, kept[-1]) for request, past, kept in kept_rows(steps, self.target_cache)
        ]
        if not last:
            return
        with torch.inference_mode():
            rows = torch.tensor([row for _, _, row in last], device=self.device)
            states_TD = taps[self.last_layer].index_select(0, rows)
        for (request, place, _), state_D in zip(last, states_TD, strict=True):
            self._states[request.id] = place, state_D

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Draft]:
        drafts = [EMPTY] * len(requests)
        ready = [i for i, r in enumerate(requests) if self._states.get(r.id, (-1,))[0] == len(r.tokens) - 2 >= 0]
        if not ready:
            return drafts
        with torch.inference_mode():
            states_RD = self.norm(torch.stack([self._states[requests[i].id][1] for i in ready]))
            logits_KRV = self.heads(states_RD)
            best_KRN, ids_KRN = logits_KRV.topk(self.num_ranks, dim=2)
            logprobs = (best_KRN - logits_KRV.logsumexp(2, keepdim=True)).transpose(0, 1).tolist()
            tokens = self.target_ids[ids_KRN].transpose(0, 1).tolist()
        for i, own_tokens, own_logprobs in zip(ready, tokens, logprobs, strict=True):
            drafts[i] = self._likeliest(own_tokens, own_logprobs, limits[i])
        return drafts

    def release(self, request: Request) -> None:
        self._states.pop(request.id, None)

    def _likeliest(self, tokens: list[list[int]], logprobs: list[list[float]], limit: int) -> Draft:
        """Of the tree's nodes those with the likeliest paths, the likeliest first. Arguments: a line per head."""
        # Rounding may put a logarithm above 0, and a node before the one it follows.
        values = [sum(min(logprobs[head][rank], 0.0) for head, rank in enumerate(path)) for path in self.paths]
        if any(value != value for value in values):  # a NaN
            return EMPTY
        order = sorted(range(len(values)), key=lambda node: -values[node])[:limit]  # stable: parents come first
        places = {self.paths[node]: place for place, node in enumerate(order)} | {(): -1}
        chosen = [self.paths[node] for node in order]
        return Draft(
            tuple(tokens[len(path) - 1][path[-1]] for path in chosen),
            tuple(places[path[:-1]] for path in chosen),
            kind=("medusa", confidence(logprobs[0][0])),
        )


def default_tree(num_heads: int, num_nodes: int = MAX_NODES) -> list[tuple[int, ...]]:
    """The best paths of ranks by how often guesses of each rank are right, the best first."""
    shares = [[_BY_HEAD[min(head, len(_BY_HEAD) - 1)] * share for share in _BY_RANK] for head in range(num_heads)]
    waiting: list[tuple[float, tuple[int, ...]]] = [(-share, (rank,)) for rank, share in enumerate(shares[0])]
    heapq.heapify(waiting)
    paths: list[tuple[int, ...]] = []
    while waiting and len(paths) < num_nodes:
        value, path = heapq.heappop(waiting)
        paths.append(path)
        if len(path) < num_heads:
            for rank, share in enumerate(shares[len(path)]):
                heapq.heappush(waiting, (value * share, (*path, rank)))
    return paths


def _checked(given: Any, source: str) -> list[tuple[int, ...]]:
    """Paths in order of length. Raises OptionError for anything but a tree of at most 63 nodes."""
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        raise OptionError(f"the tree {source} must be a list of paths such as [[0], [1], [0, 0]]")
    paths: list[tuple[int, ...]] = []
    for path in given:
        whole = isinstance(path, Sequence) and not isinstance(path, str) and len(path) > 0
        if not whole or any(isinstance(rank, bool) or not isinstance(rank, int) or rank < 0 for rank in path):
            raise OptionError(f"the tree {source} must hold paths of ranks counted from 0, not {path!r}")
        paths.append(tuple(path))
    paths = sorted(dict.fromkeys(paths), key=len)
    if len(paths) > MAX_NODES:
        raise OptionError(f"the tree {source} has {len(paths)} nodes, and at most {MAX_NODES} fit")
    for path in paths:
        if len(path) > 1 and path[:-1] not in paths:
            raise OptionError(f"the tree {source} has the path {list(path)} without {list(path[:-1])}")
    return paths
