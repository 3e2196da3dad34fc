"""An independent, smaller model that runs ahead: the drafter of Leviathan et al. 2023 and Chen et al. 2023.

It does not know the target. It has a paged cache of its own, of the same class, and batches over requests. The one
trick: it has no phases either. Its cache lags behind the text by whatever it has not seen (a prompt, a rejected
tail's replacement, the last drafted token after a full acceptance), and the first pass of `propose` feeds just that.

    its cache   [ committed: tokens it has read | scratch: its own guesses but the last ]
                                        length ─^   `observe` commits the accepted part
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..decoding.draft import EMPTY, Draft, chain
from ..decoding.noise import SeededNoise
from ..decoding.request import Request, Step
from ..decoding.sampling import process, warp
from ..errors import DraftError, OptionError
from ..models.base import CausalLM
from ..models.load import Loaded, load
from ..models.tokenizer import mismatch
from ..paged.batch import Feed, lay_out
from .base import Drafter, Setting


@dataclass(frozen=True, slots=True)
class DraftModelOptions:
    """Raises OptionError for values out of range."""

    model: Any = field(
        default=None, metadata={"help": "the draft model: a folder, a hub id, or `demo`", "flag": "draft_model"}
    )
    draft_sample_method: Literal["probabilistic", "greedy"] = field(
        default="probabilistic", metadata={"help": "draw drafts from q, or take its likeliest token"}
    )
    max_model_len: int | None = field(
        default=None, metadata={"help": "no drafting beyond this many tokens", "flag": "draft_max_model_len"}
    )

    def __post_init__(self) -> None:
        if self.draft_sample_method not in ("probabilistic", "greedy"):
            raise OptionError(
                f"draft_sample_method must be 'probabilistic' or 'greedy', not {self.draft_sample_method!r}"
            )
        if self.max_model_len is not None and self.max_model_len < 1:
            raise OptionError(f"max_model_len must be 1 or more, not {self.max_model_len}")


@dataclass(slots=True)
class _Run:
    """One request's drafting in progress."""

    request: Request
    limit: int
    noise: SeededNoise
    drawn: bool  # from q (a law is kept per token), not chosen
    tokens: list[int] = field(default_factory=list)
    laws: list[Tensor] = field(default_factory=list)

    @property
    def done(self) -> bool:
        # After the end of text nothing can follow: stopping there looks at the drawn token, but at none that counts.
        return len(self.tokens) >= self.limit or (bool(self.tokens) and self.tokens[-1] in self.request.stop_ids)


class DraftModelDrafter(Drafter):
    Options = DraftModelOptions

    def __init__(self, model: CausalLM, setting: Setting, options: DraftModelOptions | None = None):
        self.model, self.options = model, options or DraftModelOptions()
        self.num_target_ids, self.device = setting.target.vocab_size, setting.target.device
        self.max_rows = setting.max_rows
        self.context = min(model.info.context, self.options.max_model_len or model.info.context)
        num_pages = -(-setting.num_cache_tokens // setting.page_size) + setting.max_num_seqs
        self.cache = model.new_cache(num_pages, setting.page_size)
        self.num_passes = 0

    @classmethod
    def build(cls, options: Any, setting: Setting) -> "DraftModelDrafter":
        if options.model is None:
            raise DraftError("method 'draft_model' needs a draft model: give model= (or --draft-model)")
        loaded = options.model if isinstance(options.model, Loaded) else load(
            options.model, device=str(setting.device), dtype="auto")  # fmt: skip
        if setting.tokenizer and loaded.tokenizer and (odd := mismatch(loaded.tokenizer, setting.tokenizer)):
            raise DraftError(
                f"draft model {loaded.model.info.name} has another tokenizer than {setting.target.name}: {odd}; "
                "choose a draft of the same family"
            )
        return cls(loaded.model, setting, options)

    def describe(self) -> str:
        return self.model.info.name

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Draft]:
        runs = [self._begin(request, limit, requests) for request, limit in zip(requests, limits, strict=True)]
        active = [run for run in runs if run is not None]
        logits_NV = self._catch_up(active) if active else None
        while active and logits_NV is not None:
            self._choose(active, logits_NV)
            active = [run for run in active if not run.done]
            if active:
                logits_NV = self._forward(
                    [Feed(run.request.id, run.tokens[-1:], len(run.request.tokens) + len(run.tokens) - 1, 1)
                     for run in active])  # fmt: skip
        return [self._draft(run) for run in runs]

    def observe(self, steps: Sequence[Step], taps: Mapping[int, Tensor]) -> None:
        for step in steps:
            request = step.request
            if request.id in self.cache and step.num_drafted:
                # The last drafted token was never fed, so its row does not exist even if it was accepted.
                before = len(request.tokens) - len(step.tokens)
                if self.cache.length(request.id) == before:
                    rows = min(step.num_accepted, step.num_drafted - 1, len(step.tokens))
                    self.cache.commit(request.id, range(rows), request.tokens)

    def release(self, request: Request) -> None:
        self.cache.release(request.id)

    def _begin(self, request: Request, limit: int, wanted: Sequence[Request]) -> _Run | None:
        """Open or find the request's sequence and make room; None if this request cannot be drafted for now."""
        length = len(request.tokens)
        limit = min(limit, self.context - length)  # the last guess is never fed
        if limit < 1 or not self._reads(request):
            return None
        if request.id not in self.cache:
            self.cache.open(request.id, request.tokens)
        rows = length - self.cache.length(request.id) + limit - 1
        if not self.cache.reserve(request.id, rows):
            self._release_idle(wanted)
            if not self.cache.reserve(request.id, rows):
                return None
        drawn = not request.params.greedy and request.rule != "coupled"
        drawn = drawn and self.options.draft_sample_method == "probabilistic"
        return _Run(request, limit, SeededNoise(request.seed, length), drawn)

    def _reads(self, request: Request) -> bool:
        """Whether the draft model has a row for every id of the text; its table may be shorter than the target's."""
        num_ids = self.model.info.vocab_size
        if num_ids >= self.num_target_ids:
            return True
        unread = request.tokens[self.cache.length(request.id) if request.id in self.cache else 0 :]
        return max(unread) < num_ids

    def _release_idle(self, wanted: Sequence[Request]) -> None:
        keep = {request.id for request in wanted}
        for sequence in [name for name in self.cache.sequences if name not in keep]:
            self.cache.release(sequence)

    def _catch_up(self, runs: Sequence[_Run]) -> Tensor:
        """Feed what the cache lacks, in passes of at most max_rows; returns the last token's logits, one row each."""
        last: dict[str, Tensor] = {}
        waiting = list(runs)
        while waiting:
            feeds, budget = [], self.max_rows
            for run in waiting:
                past = self.cache.length(run.request.id)
                chunk = run.request.tokens[past : past + budget]
                if chunk:
                    feeds.append(Feed(run.request.id, chunk, past, int(past + len(chunk) == len(run.request.tokens))))
                budget -= len(chunk)
            rows = iter(self._forward(feeds))
            for feed in feeds:
                if feed.num_wanted:
                    last[feed.sequence] = next(rows)
            by_id = {run.request.id: run.request for run in waiting}
            for feed in feeds:
                self.cache.commit(feed.sequence, range(len(feed.tokens)), by_id[feed.sequence].tokens)
            waiting = [run for run in waiting if run.request.id not in last]
        return torch.stack([last[run.request.id] for run in runs])

    def _forward(self, feeds: list[Feed]) -> Tensor:
        self.num_passes += 1
        logits_NV = self.model.forward(lay_out(feeds, self.cache, self.model.info.device), self.cache).logits_NV
        return logits_NV[:, : self.num_target_ids]  # a table padded further than the target's has no more tokens

    def _choose(self, runs: Sequence[_Run], logits_NV: Tensor) -> None:
        """One more token for each run, by the same warping as the target's."""
        if all(run.request.params.greedy and not run.request.params.processed for run in runs):
            for run, token in zip(runs, logits_NV.argmax(1).tolist(), strict=True):
                run.tokens.append(token)
            return
        for run, logits_V in zip(runs, logits_NV, strict=True):
            request, depth = run.request, len(run.tokens)
            context = (request.params, request.prompt, [request.output + run.tokens], request.stop_ids)
            if request.params.greedy:
                run.tokens.append(int(process(logits_V[None], *context).argmax()))
                continue
            q_V = warp(logits_V[None], *context)[0]
            if run.drawn:
                run.laws.append(q_V)
                run.tokens.append(run.noise.draw(depth, q_V))
            elif request.rule == "coupled":
                run.tokens.append(run.noise.race(depth, q_V))
            else:
                run.tokens.append(int(q_V.argmax()))

    def _draft(self, run: _Run | None) -> Draft:
        if run is None or not run.tokens:
            return EMPTY
        if not run.drawn:
            return chain(run.tokens)
        q_NV = torch.stack(run.laws).to(self.device)
        if q_NV.shape[1] < self.num_target_ids:
            q_NV = F.pad(q_NV, (0, self.num_target_ids - q_NV.shape[1]))
        return chain(run.tokens, q_NV)
