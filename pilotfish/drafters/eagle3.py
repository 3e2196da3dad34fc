"""A trained head that drafts from the target's own states: EAGLE-3 (Li et al. 2025, arXiv 2503.01840).

It does not know the target's layers; what the target computed comes to it after every pass. It has a cache of its own,
one layer, on the same pages. The one trick: it has no phases. Row i of a text joins token i + 1 and the target's states
of row i; whatever rows came since the last call are read in one pass, and from there it feeds on its own output, all
requests of a batch together, chains and trees alike.

    its cache   [ rows of the text, from the target's states | scratch: its own guesses ]
                                                    length ─^

Greedy requests get a tree of the likeliest paths, those that draw a tree that is drawn, with its laws over the target's
ids (see `growing`), in a shape that follows from how often guesses were right so far (see `shapes`).

Rows whose states were never seen (the target found them in its cache) are shared like the target's, if the head read
the same text before. If not they stay a gap: the head then sees less of the text, and its guesses are a little worse.
So it is where a text leaves another at the end of a page: the target's last row there is shared, the head's, which
joins the next token, is not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from ..decoding.draft import EMPTY, MAX_NODES, Draft
from ..decoding.request import Request, Step
from ..decoding.sampling import warp
from ..errors import OptionError
from ..lazily import np, torch
from ..models.options import QUANTIZATIONS
from ..paged.batch import Feed, lay_out
from .base import Drafter, Setting
from .drawing import Reduced, Run, extend
from .growing import Drawing, Growth, best, confidence
from .shapes import RankPath, Ranks, rates_of
from .states import kept_rows

if TYPE_CHECKING:
    from torch import Tensor

    from ..heads.eagle3 import Eagle3Head

# How often drawn guesses of each rank are right, at the first, second, ... depth, before anything was seen of them.
_BY_RANK = (1.0, 0.25, 0.12, 0.07, 0.05, 0.035, 0.025, 0.02)
_BY_DEPTH = (0.6, 0.55, 0.5, 0.5)
_LEVEL = 0.05  # what a pass of the head costs in passes of the target where that is not measured


@dataclass(frozen=True, slots=True)
class Eagle3Options:
    """Raises OptionError for values out of range."""

    model: Any = field(default=None, metadata={"help": "the folder of the head", "flag": "draft_model"})
    quantization: Literal["auto", "none", "int8", "int4"] = field(
        default="auto", metadata={"help": "weights of the head; auto: int8 on a CPU", "flag": "draft_quantization"}
    )
    draft_sample_method: Literal["probabilistic", "greedy"] = field(
        default="probabilistic", metadata={"help": "draw drafts from q, or take its likeliest tokens"}
    )
    tree_width: int = field(
        default=8,
        metadata={"help": "eagle3: guesses looked at side by side, or drawn after one text; 1: chains only"},
    )
    tree_depth: int = field(default=8, metadata={"help": "eagle3: longest path of a draft that branches"})

    def __post_init__(self) -> None:
        if self.quantization not in ("auto", *QUANTIZATIONS):
            raise OptionError(f"quantization must be auto, {', '.join(QUANTIZATIONS)}, not {self.quantization!r}")
        if self.draft_sample_method not in ("probabilistic", "greedy"):
            raise OptionError(
                f"draft_sample_method must be 'probabilistic' or 'greedy', not {self.draft_sample_method!r}"
            )
        for name in ("tree_width", "tree_depth"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_NODES:
                raise OptionError(f"{name} must be a whole number from 1 to {MAX_NODES}, not {value!r}")


@dataclass(slots=True)
class _Text:
    """What the head knows of one text.

    request: whose text it is. names: what each row is known by, for rows to be shared. skew: places that were passed
    over, so that row i is place i + skew from there on. waiting: states [n, 3 hidden] of the num_waiting places behind
    the rows; they are not looked at before a draft is wanted, for it may well be none. output: state and logits of the
    last row, once all are read. drawn: the tree that is being judged.
    """

    request: Request
    names: list[int]
    skew: int = 0
    waiting: list[Tensor] = field(default_factory=list)
    num_waiting: int = 0
    output: tuple[Tensor, Tensor] | None = None
    drawn: Draft = EMPTY


@dataclass(slots=True)
class _Work:
    """One request's draft in progress: a chain, or a tree. hidden: what the rows of its next feed start from."""

    request: Request
    run: Run
    tree: Growth | Drawing | None = None
    hidden: Tensor | None = None
    kind: tuple[str, int] = ("", 0)

    @property
    def active(self) -> bool:
        return bool(self.tree.frontier) if self.tree else not self.run.done

    @property
    def num_scratch(self) -> int:
        """Rows of its own guesses, at most."""
        return self.tree.num_scratch if self.tree else self.run.limit - 1

    def feed(self, past: int) -> Feed:
        if self.tree is None:
            return Feed(self.request.id, self.run.tokens[-1:], past + len(self.run.tokens) - 1, 1)
        tree = self.tree
        tokens = [tree.tokens[node] for node in tree.frontier]
        return Feed(self.request.id, tokens, past, len(tokens), tree.ancestors(), tree.num_skipped)


class Eagle3Drafter(Drafter):
    """head: in float32, on the target's device. num_passes: of the head, so far."""

    Options = Eagle3Options
    encoder_decoder = False
    cost_grows = True

    def __init__(self, head: Eagle3Head, setting: Setting, options: Eagle3Options | None = None):
        from ..heads.stepping import Steps
        from ..paged.cache import KVCache, LayerShape

        options, config = options or Eagle3Options(), head.config
        self.head, self.options, self.target_cache = head, options, setting.cache
        self.steps = Steps(head, setting.target.kernels)
        self.num_target_ids, self.device = setting.target.vocab_size, setting.target.device
        self.max_rows, self.layers = setting.max_rows, config.taps
        self.taps = tuple(sorted(set(config.taps)))
        self.trees = setting.trees and options.tree_width > 1
        self.target_ids = head.target_ids().to(self.device)
        all_ids = len(self.target_ids) == self.num_target_ids
        self.reduced = None if all_ids else Reduced(self.target_ids, self.num_target_ids)
        scratch = -(-MAX_NODES // setting.page_size) + 1
        num_pages = -(-setting.num_cache_tokens // setting.page_size) + scratch * setting.max_num_seqs
        shape = LayerShape(config.num_key_heads, config.head_dim, config.head_dim)
        self.cache = KVCache([shape], num_pages, setting.page_size, device=self.device)
        self.cache.prefix_sharing = setting.cache.prefix_sharing
        self.num_passes = 0
        self.ranks = Ranks(rates_of(_BY_DEPTH, _BY_RANK[: min(options.tree_width, len(self.target_ids))]))
        self._texts: dict[str, _Text] = {}
        self._num_unshared = 0

    @classmethod
    def build(cls, options: Any, setting: Setting) -> Eagle3Drafter:
        from ..heads.eagle3 import Eagle3Head
        from ..heads.layers import placed
        from ..heads.store import load_for

        head = load_for(options.model, setting.model, setting.tokenizer, "eagle3")
        assert isinstance(head, Eagle3Head)
        placed(head, options.quantization, setting.target)
        return cls(head, setting, options)

    def describe(self) -> str:
        return f"{len(self.target_ids)} of the target's {self.num_target_ids} ids, states of layers {self.layers}"

    # -- what the target computed ----------------------------------------------------------------------------------

    def observe(self, steps: Sequence[Step], taps: Mapping[int, Tensor]) -> None:
        self._tally(steps)
        rows, owners = list[int](), list[tuple[_Text, int]]()
        arrivals = list(kept_rows(steps, self.target_cache))
        if any(past > 0 and request.id not in self._texts for request, past, _ in arrivals):
            self._read_ahead()  # the target may have found what the head was given, but has not read yet
        for request, past, kept in arrivals:
            text = self._text(request, past, past + len(kept))
            new = kept[self._end(request) - past :]
            if new:
                rows += new
                owners.append((text, len(new)))
        if not rows:
            return
        with torch.inference_mode():
            states_TD = self._states([taps[layer] for layer in self.layers], rows)
            parts = torch.split(states_TD, [count for _, count in owners])
        for (text, count), part in zip(owners, parts, strict=True):
            text.waiting.append(part)
            text.num_waiting += count
            text.output = None

    def _states(self, taps: Sequence[Tensor], rows: Sequence[int]) -> Tensor:
        """These rows' states of all tapped layers side by side. In every pass: so on a CPU without torch, see
        `models.quantized`."""
        if all(states_TD.device.type == "cpu" and states_TD.dtype == torch.float32 for states_TD in taps):
            return torch.from_numpy(np.concatenate([states_TD.numpy()[rows] for states_TD in taps], axis=1))
        index = torch.tensor(rows, device=self.device)
        return torch.cat([states_TD.index_select(0, index).float() for states_TD in taps], dim=1)

    def release(self, request: Request) -> None:
        self._close(request.id)

    def _tally(self, steps: Sequence[Step]) -> None:
        """Learn from what became of trees that were drawn. Of a run cut short not every node was decided."""
        for step in steps:
            text = self._texts.get(step.request.id)
            if text is not None and step.tokens:
                draft, text.drawn = text.drawn, EMPTY
                if 0 < len(draft) == step.num_drafted and not step.finish:
                    self.ranks.note_tree(draft, step.tokens[: step.num_accepted])

    def _text(self, request: Request, past: int, stop: int) -> _Text:
        """What is known of the text whose places past..stop-1 are coming; what was known is given up if they do not
        follow it."""
        if request.id in self._texts and self._end(request) < past:
            self._close(request.id)
        if request.id not in self._texts:
            names = self._names(request, 0, stop)
            found = self.cache.open(request.id, names, adapter=request.adapter)
            self._texts[request.id] = _Text(request, names[:found], skew=max(0, past - found))
        return self._texts[request.id]

    def _names(self, request: Request, start: int, stop: int) -> list[int]:
        """What the rows of these places are known by: the token each joins; the first one also by the one before."""
        names = request.tokens[start + 1 : stop + 1]
        if start == 0:
            names[0] += (request.tokens[0] + 1) * self.num_target_ids
        return names

    def _end(self, request: Request) -> int:
        """The first place whose state is still to come."""
        text = self._texts[request.id]
        return self.cache.length(request.id) + text.skew + text.num_waiting

    # -- drafting --------------------------------------------------------------------------------------------------

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Draft]:
        works = [self._begin(request, limit, requests) for request, limit in zip(requests, limits, strict=True)]
        active = [work for work in works if work is not None]
        if not active:
            return [EMPTY] * len(requests)
        with torch.inference_mode():
            self._read([work.request for work in active])
            states, logits = zip(*(self._output(work.request) for work in active), strict=True)
            hidden_TD, logits_TV, counts = _rows(states), _rows(logits), [1] * len(active)
            while True:
                self._choose(active, counts, hidden_TD, logits_TV)
                active = [work for work in active if work.active]
                if not active:
                    break
                hidden_TD, logits_TV, counts = self._step(active)
        return [EMPTY if work is None else self._draft(work) for work in works]

    def _begin(self, request: Request, limit: int, wanted: Sequence[Request]) -> _Work | None:
        """Make room; None if the states of this request's text are not all there, or there is no room."""
        text = self._texts.get(request.id)
        if text is None or self._end(request) != len(request.tokens) - 1:
            return None
        probabilistic = self.options.draft_sample_method == "probabilistic"
        work = _Work(request, Run(request, limit, probabilistic))
        if self.trees and not request.params.processed:
            if work.run.drawn:
                work.tree = Drawing(request, self._shape(limit), self.target_ids)
            elif request.params.greedy or not probabilistic:
                depth = min(self.options.tree_depth, limit)
                work.tree = Growth(limit, self.options.tree_width, depth, request.stop_ids, self.level_cost)
        num_rows = text.num_waiting + work.num_scratch
        if not self.cache.reserve(request.id, num_rows):
            self._close_idle(wanted)
            if not self.cache.reserve(request.id, num_rows):
                return None
        return work

    def _shape(self, limit: int) -> list[RankPath]:
        shapes = self.ranks.shapes
        cost = self.level_cost or _LEVEL
        return shapes.tree(*shapes.size([limit], self.options.tree_depth, cost, lambda _nodes: 1.0))

    def _read(self, requests: Sequence[Request]) -> None:
        """Feed what is waiting, at most max_rows a pass, and keep it; the last row's output is where drafts begin."""
        todo = [request for request in requests if self._texts[request.id].waiting]
        while todo:
            feeds: list[Feed] = []
            states: list[Tensor] = []
            budget = self.max_rows
            for request in todo:
                if budget <= 0:
                    break
                text, past = self._texts[request.id], self.cache.length(request.id)
                waiting_TD = torch.cat(text.waiting)
                states.append(waiting_TD[:budget])
                text.waiting = [waiting_TD[budget:]] if len(waiting_TD) > budget else []
                text.num_waiting = max(0, len(waiting_TD) - budget)
                place = past + text.skew + 1
                feeds.append(Feed(request.id, request.tokens[place : place + len(states[-1])], past, 1))
                budget -= len(states[-1])
            last = torch.tensor([len(part) for part in states]).cumsum(0) - 1
            hidden_TD, logits_NV = self._forward(feeds, self.head.fuse(torch.cat(states)))
            for request, feed, *output in zip(todo, feeds, hidden_TD[last.to(self.device)], logits_NV, strict=False):
                self._keep(request, len(feed.tokens))
                self._texts[request.id].output = output[0], output[1]
            todo = [request for request in todo if self._texts[request.id].waiting]

    def _read_ahead(self) -> None:
        """Read whatever is waiting, as far as there is room."""
        waiting = [text for text in self._texts.values() if text.waiting]
        with torch.inference_mode():
            self._read([t.request for t in waiting if self.cache.reserve(t.request.id, t.num_waiting)])

    def _keep(self, request: Request, count: int) -> None:
        """Rows just read of the text stay."""
        text, past = self._texts[request.id], self.cache.length(request.id)
        if text.skew:  # behind a gap a row is like no other text's
            text.names += range(-self._num_unshared - 1, -self._num_unshared - 1 - count, -1)
            self._num_unshared += count
        else:
            text.names += self._names(request, past, past + count)
        self.cache.commit(request.id, range(count), text.names)

    def _output(self, request: Request) -> tuple[Tensor, Tensor]:
        output = self._texts[request.id].output
        assert output is not None, "all rows are read"
        return output

    def _step(self, works: Sequence[_Work]) -> tuple[Tensor, Tensor, list[int]]:
        """One pass over what was just chosen, with its outputs, and how many rows each has."""
        feeds = [work.feed(self.cache.length(work.request.id)) for work in works]
        states = [work.hidden for work in works if work.hidden is not None]
        return *self._forward(feeds, torch.cat(states)), [len(feed.tokens) for feed in feeds]

    def _forward(self, feeds: Sequence[Feed], states_TD: Tensor) -> tuple[Tensor, Tensor]:
        """States of all rows, logits of those wanted."""
        self.num_passes += 1
        batch = lay_out(feeds, self.cache, self.device)
        if any(self._texts[feed.sequence].skew for feed in feeds):
            skews = [self._texts[feed.sequence].skew for feed in feeds for _ in feed.tokens]
            batch.positions = [position + skew for position, skew in zip(batch.positions, skews, strict=True)]
        return self.steps.run(batch, self.cache, states_TD)

    def _choose(self, works: Sequence[_Work], counts: Sequence[int], hidden_TD: Tensor, logits_TV: Tensor) -> None:
        """Each work's next tokens, from what its rows came out as."""
        first: list[int] = []  # of each chain, its row
        chains: list[Run] = []
        grown: list[tuple[_Work, int, int]] = []
        start = 0
        for work, count in zip(works, counts, strict=True):
            stop = start + count
            if work.tree is None:
                first.append(start)
                chains.append(work.run)
                work.hidden = hidden_TD[start:stop]
            elif isinstance(work.tree, Drawing):
                work.tree.add(warp(logits_TV[start:stop], work.request.params).unbind())
                work.hidden = hidden_TD[start:stop][work.tree.sources]
            else:
                grown.append((work, start, stop))
            start = stop
        if chains:
            extend(chains, [()] * len(chains), logits_TV[first], self.reduced)
        if grown:
            self._grow(grown, logits_TV, hidden_TD)

    def _grow(self, works: Sequence[tuple[_Work, int, int]], logits_TV: Tensor, hidden_TD: Tensor) -> None:
        ids, logprobs = best(logits_TV, min(self.options.tree_width, logits_TV.shape[1]))
        tokens = self.target_ids[ids].tolist()
        for work, start, stop in works:
            tree = work.tree
            assert isinstance(tree, Growth)
            if not tree.tokens:
                work.kind = ("tree", confidence(logprobs[start][0]))
            tree.add(tokens[start:stop], logprobs[start:stop])
            work.hidden = hidden_TD[start:stop][tree.sources]

    def _draft(self, work: _Work) -> Draft:
        if isinstance(work.tree, Growth):
            return work.tree.draft(work.kind)
        if isinstance(work.tree, Drawing):
            draft = work.tree.draft(self.num_target_ids, ("drawn", 0))
            self._texts[work.request.id].drawn = Draft(draft.tokens, draft.parents)
            return draft
        return replace(work.run.draft(self.num_target_ids, self.device), kind=("chain", 0))

    # -- room --------------------------------------------------------------------------------------------------------

    def _close(self, sequence: str) -> None:
        self.cache.release(sequence)
        self._texts.pop(sequence, None)

    def _close_idle(self, wanted: Sequence[Request]) -> None:
        keep = {request.id for request in wanted}
        for sequence in [name for name in self.cache.sequences if name not in keep]:
            self._close(sequence)


def _rows(rows: Sequence[Tensor]) -> Tensor:
    return rows[0][None] if len(rows) == 1 else torch.stack(list(rows))
