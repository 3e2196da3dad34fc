"""Trained heads that each guess one token further ahead from the target's last state (Cai et al. 2024, 2401.10774).

It does not know the target's layers; the last one's output comes to it after every pass. No head sees what another
guessed, so one pass of small matrices is the whole of drafting. The one trick: what is lost by that is won back by
branching. A tree of ranks says which guesses are worth combining (the second-best of head 1 behind the best of head 0,
...), and of its nodes those with the likeliest paths are handed out. Unless a tree is given, it is the best one by how
often guesses of each rank were right so far, at temperature 0 and above it.

Every guess is judged exactly, as any other: Medusa's "typical acceptance", which changes the text, does not exist here.
"""

from __future__ import annotations

import json
import math
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
from .growing import best, confidence
from .shapes import RankPath, Ranks, Shapes, rates_of
from .states import kept_rows

if TYPE_CHECKING:
    from torch import Tensor

    from ..heads.medusa import MedusaHeads
    from ..models.base import Ends

# How often the guess of each rank was right, as a share of the first one's, and how the first one's falls from head to
# head: what the trees that come with Medusa's own weights imply, roughly.
_BY_RANK = (1.0, 0.27, 0.13, 0.09, 0.065, 0.05, 0.04, 0.033, 0.028, 0.024)
_BY_HEAD = (0.55, 0.44, 0.35, 0.28, 0.23)


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
    """heads: in float32, on the target's device. ends: the target's. paths: the tree; if None, by what is learned."""

    Options = MedusaOptions
    encoder_decoder = False

    def __init__(
        self, heads: MedusaHeads, ends: Ends, setting: Setting, paths: Sequence[tuple[int, ...]] | None = None
    ):
        self.heads, self.norm, self.target_cache = heads, ends.norm, setting.cache
        self.device, self.last_layer = setting.target.device, len(setting.target.layers) - 1
        self.taps = (self.last_layer,)
        self.trees = setting.trees
        self.target_ids = heads.target_ids().to(self.device)
        num_heads, num_ids = heads.config.num_heads, heads.config.draft_vocab_size
        if paths is not None and max(map(len, paths)) > num_heads:
            raise DraftError(f"the tree has paths of {max(map(len, paths))} guesses, and there are {num_heads} heads")
        if not self.trees:
            paths = [(0,) * (depth + 1) for depth in range(num_heads)]
        self.paths = None if paths is None else [path for path in paths if max(path) < num_ids]
        self.num_ranks = min(num_ids, len(_BY_RANK)) if self.paths is None else 1 + max(map(max, self.paths))
        self.ranks = {greedy: Ranks(_rates(num_heads, self.num_ranks)) for greedy in (True, False)}
        self._guesses: dict[str, list[list[int]]] = {}  # what is being judged: a line per head, the likeliest first
        self._states: dict[str, tuple[int, Tensor]] = {}  # the last state that was seen, and its place

    @classmethod
    def build(cls, options: Any, setting: Setting) -> MedusaDrafter:
        from ..heads.layers import placed
        from ..heads.medusa import MedusaHeads
        from ..heads.store import load_for

        heads = load_for(options.model, setting.model, setting.tokenizer, "medusa")
        assert isinstance(heads, MedusaHeads)
        placed(heads, options.quantization, setting.target)
        return cls(heads, setting.model.ends(), setting, options.paths)

    def describe(self) -> str:
        size = MAX_NODES if self.paths is None else len(self.paths)
        return f"{self.heads.config.num_heads} heads, a tree of {size} nodes"

    def tree(self, greedy: bool) -> Sequence[RankPath]:
        """The nodes that drafts are taken from, for requests at temperature 0 or above it."""
        if self.paths is not None:
            return self.paths
        return self.ranks[greedy].shapes.tree(MAX_NODES, self.heads.config.num_heads)

    def observe(self, steps: Sequence[Step], taps: Mapping[int, Tensor]) -> None:
        self._tally(steps)
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
            by_request_TV = logits_KRV.transpose(0, 1).reshape(-1, logits_KRV.shape[2])
            ids_TN, values = best(by_request_TV, self.num_ranks)
            tokens = self.target_ids[ids_TN].view(len(ready), -1, self.num_ranks).tolist()
            num_heads = len(logits_KRV)
            logprobs = [values[i * num_heads : (i + 1) * num_heads] for i in range(len(ready))]
        for i, own_tokens, own_logprobs in zip(ready, tokens, logprobs, strict=True):
            if self.paths is None:
                self._guesses[requests[i].id] = own_tokens
            drafts[i] = _likeliest(self.tree(requests[i].params.greedy), own_tokens, own_logprobs, limits[i])
        return drafts

    def release(self, request: Request) -> None:
        self._states.pop(request.id, None)
        self._guesses.pop(request.id, None)

    def _tally(self, steps: Sequence[Step]) -> None:
        """Learn from what came, whoever drafted: every token is what the target says, so all ranks are judged by it."""
        for step in steps:
            guesses = self._guesses.pop(step.request.id, None) if step.tokens else None
            if guesses is None:
                continue
            ranks = self.ranks[step.request.params.greedy]
            for head, (line, token) in enumerate(zip(guesses, step.tokens, strict=False)):
                ranks.note(head, line.index(token) if token in line else None, len(line))
                if token not in line:
                    break
            ranks.count()


def _likeliest(
    paths: Sequence[RankPath], tokens: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float]], limit: int
) -> Draft:
    """Of a tree's nodes those with the likeliest paths, the likeliest first. Tokens and logarithms: a line per head."""
    values: dict[RankPath, float] = {(): 0.0}
    for path in paths:
        # Rounding may put a logarithm above 0, and a node before the one it follows.
        values[path] = values[path[:-1]] + min(logprobs[len(path) - 1][path[-1]], 0.0)
    if any(value != value for value in values.values()):  # a NaN
        return EMPTY
    chosen = sorted(paths, key=lambda path: -values[path])[:limit]  # stable: parents come first
    places = {path: place for place, path in enumerate(chosen)} | {(): -1}
    return Draft(
        tuple(tokens[len(path) - 1][path[-1]] for path in chosen),
        tuple(places[path[:-1]] for path in chosen),
        kind=("medusa", confidence(logprobs[0][0])),
        chances=tuple(math.exp(values[path]) for path in chosen),
    )


def default_tree(num_heads: int, num_nodes: int = MAX_NODES) -> list[RankPath]:
    """The best paths of ranks before anything was seen of the heads, the best first."""
    return Shapes(_rates(num_heads, len(_BY_RANK))).tree(num_nodes, num_heads)


def _rates(num_heads: int, num_ranks: int) -> list[list[float]]:
    by_head = [_BY_HEAD[min(head, len(_BY_HEAD) - 1)] for head in range(num_heads)]
    return rates_of(by_head, _BY_RANK[:num_ranks])


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
