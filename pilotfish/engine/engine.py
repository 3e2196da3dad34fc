"""Engine: the one loop. Plain decoding, chains, trees, prefill and batches all go through `step`.

It does not know text, files or sockets. The one trick is that there is nothing to know: plan, draft, run, verify,
commit, report; every feature enters through a noun that the loop already has.
"""

import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from ..decoding.draft import EMPTY, Draft, accepted_nodes
from ..decoding.grammar import Constraint
from ..decoding.hearing import Hearing
from ..decoding.noise import fold
from ..decoding.request import FinishReason, Request, Step, TextStream
from ..decoding.sampling import SamplingParams
from ..decoding.source import Source, ids_of
from ..decoding.verify import Rule, Verdict
from ..drafters import registry
from ..drafters.base import Drafter, Setting
from ..errors import CapacityError, OptionError, PilotfishError, PromptError, unknown_name
from ..models.base import CausalLM, ModelInfo
from ..models.grammars import Grammars
from ..models.tokenizer import Tokenizer
from ..paged.batch import lay_out
from ..paged.cache import KVCache
from .controller import Adaptive, Controller, Fixed
from .costs import measured
from .judge import Hearings, Judgement, judge
from .memory import bytes_per_token, size_pool
from .options import EngineOptions
from .scheduler import Entry, Plan, Scheduler

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Guess:
    """A draft as it was judged, for those who want to look at it; a tree as in `Draft`, without laws, which are large.

    method: of the drafter that made it. accepted: the nodes that became text.
    """

    method: str
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    accepted: frozenset[int]


@dataclass(frozen=True, slots=True)
class Event:
    """What one step did for one request; fields as in `Step`. finish: set on a request's last event. guess: its draft,
    if it had one and the request is `traced`. While somebody witnesses: hearing, what the verdict was based on, and
    num_allowed, the most nodes its draft could have."""

    request: Request
    tokens: tuple[int, ...] = ()
    pieces: tuple[str, ...] = ()
    num_drafted: int = 0
    num_accepted: int = 0
    finish: FinishReason | None = None
    guess: Guess | None = None
    hearing: Hearing | None = None
    num_allowed: int = 0

    @property
    def text(self) -> str:
        """What became final with this step."""
        return "".join(self.pieces)


class Engine:
    """Continuous batching over one target, one cache and one drafter.

    rule: for requests without a seed; those with one use ``coupled``. num_speculative_tokens: most nodes a draft,
    or "auto": as many as pay, from measured costs and acceptance.
    entropy: where a request without a seed gets the noise it is decided by; the system's, unless runs must repeat.
    witness: hears of every event, which then says what its verdict was based on. None costs nothing; no text changes.
    """

    def __init__(
        self,
        target: CausalLM,
        build_drafter: Callable[[Setting], Drafter],
        options: EngineOptions | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        rule: Rule = "rejection",
        num_speculative_tokens: int | Literal["auto"] = 5,
        entropy: Callable[[], int] = lambda: secrets.randbits(63),
    ):
        options = options or EngineOptions()
        self.target, self.options, self.tokenizer, self.rule = target, options, tokenizer, rule
        self.num_speculative_tokens, self.entropy = num_speculative_tokens, entropy
        self.max_length = options.max_model_len or target.info.context
        if self.max_length > target.info.context:
            raise OptionError(
                f"max_model_len {self.max_length} is more than {target.info.name} takes ({target.info.context} tokens)"
            )
        self.grammars = Grammars(tokenizer, target.info.vocab_size)
        self.cache = self._new_cache(options)
        self.cache.prefix_sharing = options.enable_prefix_caching
        self.drafter = build_drafter(
            Setting(
                target=target.info,
                model=target,
                cache=self.cache,
                tokenizer=tokenizer,
                max_length=self.max_length,
                max_num_seqs=options.max_num_seqs,
                page_size=options.block_size,
                max_rows=options.max_num_batched_tokens,
                num_cache_tokens=self.cache.capacity,
                device=target.info.device,
                trees=rule != "block",
            )
        )
        if rule == "block" and self.drafter.trees:
            raise OptionError("rejection_sample_method 'block' is for chains, and this method drafts trees")
        self.arms = tuple(self.drafter.arms)
        self.controller: Controller = (
            Adaptive(measured(target), num_arms=len(self.arms), growing=[arm.cost_grows for arm, _ in self.arms])
            if num_speculative_tokens == "auto"
            else Fixed(num_speculative_tokens)
        )
        self.scheduler = Scheduler(self.cache, options, self.controller.limits)
        self._next_id = 0
        self.num_failed_drafts = 0
        self.witness: Callable[[Event], None] | None = None

    def _new_cache(self, options: EngineOptions) -> KVCache:
        info = self.target.info
        num_pages = size_pool(info, options, self.max_length)
        try:
            return self.target.new_cache(num_pages, options.block_size)
        except (RuntimeError, MemoryError, OverflowError) as error:
            size = num_pages * options.block_size * bytes_per_token(info) / 2**30
            raise CapacityError(
                f"a pool of {num_pages} pages needs {size:.1f} GiB, which {info.device} does not have; lower num_pages "
                "(or kv_cache_memory)"
            ) from error

    # -- requests ------------------------------------------------------------------------------------------------

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        text_stream: Callable[[], TextStream] | None = None,
        reference: Sequence[int] = (),
        traced: bool = False,
        source: Source | Sequence[int] | None = None,
        adapter: str | None = None,
    ) -> list[Request]:
        """Queue a prompt; returns ``params.n`` requests, one per completion. traced: their events shall show drafts.

        An encoder-decoder's prompt is what its encoder reads. To have its decoder's text begin with something else than
        usual, give both: what the encoder reads as ``source``, and that beginning as the prompt. A model that hears has
        its features as source, and an empty prompt is the usual beginning. adapter: one of the target's, by name; None
        is the target alone.

        Raises PromptError for an empty or too long prompt, CapacityError if the page pool cannot hold it, OptionError
        for structured output that is no grammar or admits nothing.
        """
        source, prompt = self.target.info.opening(prompt, source)
        self._check_source(source)
        self._check_prompt(prompt, params, text_stream)
        params = self.target.info.ruled(params)
        if adapter is not None and adapter not in self.target.info.adapters:
            raise unknown_adapter(adapter, self.target.info)
        self._check_ids("reference", reference)
        seed = self.entropy() if params.seed is None else params.seed
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.target.info.eos_ids)
        wanted = params.structured_outputs
        requests = []
        for choice in range(params.n):
            self._next_id += 1
            requests.append(
                Request(
                    id=str(self._next_id),
                    prompt=tuple(prompt),
                    params=params,
                    seed=fold(seed, choice),
                    rule=self.rule if params.seed is None else "coupled",
                    max_length=self.max_length,
                    stop_ids=stop_ids,
                    constraint=None if wanted is None else Constraint(self.grammars.matcher(wanted), stop_ids),
                    text_stream=text_stream() if text_stream else None,
                    reference=tuple(reference),
                    source=source,
                    adapter=adapter or "",
                    traced=traced,
                )
            )
        for request in requests:
            self.scheduler.add(request)
        return requests

    def abort(self, request: Request, reason: FinishReason = FinishReason.ABORT) -> Event:
        """End a request now; its pages are free at once. Aborting a finished one does nothing."""
        text = request.finish_with(reason)
        self._forget(request)
        return Event(request, pieces=(text,), finish=request.finish)

    @property
    def has_work(self) -> bool:
        return len(self.scheduler) > 0

    # -- the loop ------------------------------------------------------------------------------------------------

    def step(self) -> list[Event]:
        """One target pass over everything that is planned; returns what happened, an event per request."""
        plan = self.scheduler.plan()
        if not plan.entries:
            return []
        drafts, makers = self._draft(plan)
        feeds = [entry.feed(draft) for entry, draft in zip(plan.entries, drafts, strict=True)]
        batch = lay_out(feeds, self.cache, self.target.info.device)
        reads = not all(self.cache.was_read(feed.sequence) for feed in feeds)  # an encoder's time says nothing of rows
        started = time.perf_counter()
        output = self.target.forward(batch, self.cache, taps=self.drafter.taps)
        ready = [(entry.request, draft) for entry, draft in zip(plan.entries, drafts, strict=True) if entry.caught_up]
        hearings = None if self.witness is None else Hearings()
        judgements = iter(judge([r for r, _ in ready], [d for _, d in ready], output.logits_NV, hearings, output.best))
        if not reads:
            self.controller.spent(batch.num_rows, time.perf_counter() - started)
        steps = [
            self._advance(entry, draft, next(judgements) if entry.caught_up else None)
            for entry, draft in zip(plan.entries, drafts, strict=True)
        ]
        for step in steps:
            self.cache.commit(step.request.id, step.kept, step.request.tokens)
        self.controller.learn(steps, drafts)
        self._observe(steps, output.taps)
        events = [self._report(*of_one, hearings) for of_one in zip(steps, drafts, makers, strict=True)]
        if (witness := self.witness) is not None:
            for event in events:
                witness(event)
        return events

    def _draft(self, plan: Plan) -> tuple[list[Draft], list[tuple[int, int]]]:
        """Ask the drafters in turn; returns a draft per entry, and which arm made it, with the most nodes that it was
        allowed (of an empty one, the last arm that was asked). Whatever goes wrong there costs speed, never a
        request, and is logged."""
        drafts: dict[str, Draft] = {}
        makers: dict[str, tuple[int, int]] = {}
        for arm, (drafter, most) in enumerate(self.arms):
            waiting = [entry for entry in plan.drafting if entry.request.id not in drafts]
            allowed = self.controller.arm_limits(arm, [entry.request for entry in waiting])
            limits = [min(entry.limit, own, most) for entry, own in zip(waiting, allowed, strict=True)]
            requests = [entry.request for entry, limit in zip(waiting, limits, strict=True) if limit]
            found = self._ask(arm, drafter, requests, [limit for limit in limits if limit]) if requests else []
            drafts.update({request.id: draft for request, draft in zip(requests, found, strict=True) if len(draft)})
            for entry, limit in zip(waiting, limits, strict=True):
                if limit or entry.request.id not in makers:
                    makers[entry.request.id] = (arm, limit)
        ids = [entry.request.id for entry in plan.entries]
        return [drafts.get(own, EMPTY) for own in ids], [makers.get(own, (0, 0)) for own in ids]

    def _ask(self, arm: int, drafter: Drafter, requests: list[Request], limits: list[int]) -> list[Draft]:
        drafter.level_cost = self.controller.level_cost(arm, requests)
        started = time.perf_counter()
        try:
            proposed = drafter.propose(requests, limits)
            proposed = [self._admissible(draft, limit) for draft, limit in zip(proposed, limits, strict=True)]
            proposed = [_within_grammar(*pair) for pair in zip(requests, proposed, strict=True)]
        except Exception:
            self.num_failed_drafts += 1
            log.exception("the drafter failed; this step decodes plainly (%d so far)", self.num_failed_drafts)
            return [EMPTY] * len(requests)
        self.controller.drafted(arm, requests, proposed, time.perf_counter() - started)
        return self.controller.cut(arm, requests, proposed)

    def _observe(self, steps: Sequence[Step], taps: Mapping[int, Tensor]) -> None:
        try:
            self.drafter.observe(steps, taps)
        except Exception:
            self.num_failed_drafts += 1
            log.exception("the drafter failed to take in what was kept (%d failures so far)", self.num_failed_drafts)

    def _admissible(self, draft: Draft, limit: int) -> Draft:
        """Cut by position, which is exact for drawn tokens too; ids must be the target's, and laws numbers.

        Everything that could fail behind this point is met here, where it costs a draft and no request.
        """
        num_ids = self.target.info.vocab_size
        if not all(type(token) is int and 0 <= token < num_ids for token in draft.tokens):
            raise PilotfishError(f"drafted ids {draft.tokens!r} are not all in the target's table of {num_ids}")
        hash((draft.tokens, draft.parents, draft.kind))  # a TypeError is the drafter's
        if draft.chances is not None and not all(0 <= chance <= 1 for chance in draft.chances):  # a NaN fails too
            raise PilotfishError(f"a draft's chances {draft.chances!r} are not all from 0 to 1")
        if draft.probs is not None:
            limit = min(limit, self._num_laws(draft.probs, (len(draft), num_ids)))
            probs = draft.probs.detach()
            draft = replace(draft, probs=probs if probs.dtype in (torch.float32, torch.float64) else probs.float())
        if self.rule == "block" and not draft.is_chain:
            raise PilotfishError("a draft with branches, where 'block' judges chains")
        return draft.first(limit)

    def _num_laws(self, probs: Tensor, shape: tuple[int, int]) -> int:
        """How many nodes have a law, before the first that is no probabilities. A law knows only the draws before its
        own, so a cut there is exact, while dropping the whole draft for it would be choosing by what was drawn."""
        device = self.target.info.device
        if not isinstance(probs, Tensor) or not probs.is_floating_point() or probs.layout != torch.strided:
            raise PilotfishError(f"draft laws must be a dense tensor of floats, not {type(probs).__name__}")
        if probs.shape != shape or probs.device != device:
            raise PilotfishError(f"draft laws of shape {tuple(probs.shape)} on {probs.device}, not {shape} on {device}")
        if len(probs) == 0:
            return 0
        low_N, high_N = _extremes(probs.detach())
        # Rounding may leave a little more than 1; a NaN fails too.
        fine_N: list[bool] = ((low_N >= 0) & (high_N < 2)).tolist()
        if all(fine_N):
            return len(fine_N)
        self.num_failed_drafts += 1
        log.error("a draft's law is no probabilities; it is cut there (%d failures so far)", self.num_failed_drafts)
        return fine_N.index(False)

    def _advance(self, entry: Entry, draft: Draft, judgement: Judgement | PilotfishError | None) -> Step:
        request = entry.request
        if isinstance(judgement, PilotfishError):
            log.error("%s", judgement)
            request.error = str(judgement)
            text = request.finish_with(FinishReason.ERROR)
            num_rows = entry.num_trunk + len(draft)
            return Step(request, kept=range(0), pieces=(text,), finish=request.finish, num_rows=num_rows)
        verdict: Verdict | None
        verdict, logprobs = judgement if judgement is not None else (None, [])
        return request.advance(entry.num_trunk, draft, verdict, logprobs)

    def _report(self, step: Step, draft: Draft, maker: tuple[int, int], hearings: Hearings | None) -> Event:
        if step.finish:
            self._forget(step.request)
        guess, (arm, num_allowed) = None, maker
        hearing = hearings[step.request.id]() if hearings and step.request.id in hearings else None
        if step.num_drafted and (step.request.traced or hearing):
            accepted = accepted_nodes(draft, step.tokens[: step.num_accepted])
            method = registry.method_of(self.arms[arm][0])
            guess = Guess(method, draft.tokens, draft.parents, frozenset(accepted))
        kept = (step.tokens, step.pieces, step.num_drafted, step.num_accepted, step.finish)
        return Event(step.request, *kept, guess, hearing, num_allowed)

    # -- small helpers -------------------------------------------------------------------------------------------

    def _forget(self, request: Request) -> None:
        self.scheduler.remove(request)
        self.controller.release(request)
        try:
            self.drafter.release(request)
        except Exception:
            self.num_failed_drafts += 1
            log.exception("the drafter failed to forget a request (%d failures so far)", self.num_failed_drafts)

    def _check_prompt(self, prompt: Sequence[int], params: SamplingParams, text_stream: object) -> None:
        if len(prompt) == 0:
            raise PromptError("the prompt is empty: give at least one token")
        if len(prompt) >= self.max_length:
            raise PromptError(
                f"the prompt has {len(prompt)} tokens and the context {self.max_length}, of which at least one is for "
                "the answer; shorten the prompt"
            )
        self._check_ids("prompt", prompt)
        num_ids = self.target.info.vocab_size
        for name in ("logit_bias", "stop_token_ids", "begin_suppress_tokens"):
            for token in getattr(params, name) or ():
                if not 0 <= token < num_ids:
                    raise OptionError(f"{name} names token {token}, which is not an id from 0 to {num_ids - 1}")
        if params.stop and text_stream is None:
            raise OptionError("stop strings need a tokenizer; use stop_token_ids")

    def _check_source(self, source: Source) -> None:
        if (reason := self.target.info.refusal(source)) is not None:
            raise PromptError(reason)
        self._check_ids("prompt", ids_of(source))

    def _check_ids(self, name: str, ids: Sequence[int]) -> None:
        num_ids = self.target.info.vocab_size
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < num_ids:
                raise PromptError(f"{name} token {token!r} is not an id from 0 to {num_ids - 1}")


def unknown_adapter(adapter: object, target: ModelInfo) -> OptionError:
    """The error for an adapter that the target does not have, naming the nearest one."""
    if not target.adapters:
        return OptionError(f"{target.name} was loaded without adapters, so there is no {str(adapter)[:64]!r}")
    return unknown_name("adapter", str(adapter), target.adapters)


def _within_grammar(request: Request, draft: Draft) -> Draft:
    """What of a draft the request's grammar admits; `pilotfish.decoding.grammar` says why drawn tokens stay."""
    return draft if request.constraint is None else request.constraint.cut(draft)


def _extremes(probs: Tensor) -> tuple[Any, Any]:
    """Of each row. On a CPU numpy's: see `pilotfish.decoding.sampling`."""
    if probs.device.type == "cpu" and probs.dtype in (torch.float32, torch.float64):
        return probs.numpy().min(1), probs.numpy().max(1)
    low_N, high_N = probs.aminmax(dim=1)
    return low_N, high_N
