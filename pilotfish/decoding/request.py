"""Request: one completion on its way, and the one commit walk that decides what of an accepted run is kept.

It does not know caches, models or batches. The one trick: `Request.advance` walks the accepted tokens one by one, so
EOS, stop ids, stop strings, max_tokens and the context's end are met exactly where plain decoding would meet them;
everything after the first hit never existed: not in ids, text, log-probabilities, cache rows or statistics.

    tokens   [ prompt ........ | output ............ pending ]
               num_prompt ──────^                    ^── the last token: its row is fed next
    the cache of a caught-up request holds exactly tokens[:-1]
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from ..errors import PilotfishError
from .draft import Draft
from .grammar import Constraint
from .sampling import SamplingParams
from .source import Source, ids_of
from .verify import Rule, Verdict


class FinishReason(StrEnum):
    """Why a completion ended; values as in the OpenAI API, plus ``abort``."""

    STOP = "stop"  # end of text, a stop id or a stop string
    LENGTH = "length"  # max_tokens or the context's end
    ABORT = "abort"  # the caller asked for it
    ERROR = "error"  # this request failed; the others go on


class TextStream(Protocol):
    """Turns ids into text as they come; `pilotfish.models.tokenizer.Detokenizer` is one."""

    def feed(self, token: int) -> str:
        """The text that became final with this token."""

    def flush(self) -> str:
        """What was held back."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The target's log-probability of an emitted token (after warping, unless raw ones were asked for), and those of
    the likeliest tokens."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class SpeculationStats:
    """What drafting did for one request, counted after the commit walk. Field names as in vLLM."""

    per_step_drafted: list[int] = field(default_factory=list)
    per_step_accepted: list[int] = field(default_factory=list)
    num_steps: int = 0  # passes that emitted, with or without a draft

    def count(self, drafted: int, accepted: int) -> None:
        self.num_steps += 1
        if drafted:
            self.per_step_drafted.append(drafted)
            self.per_step_accepted.append(accepted)

    def acceptance_histogram(self) -> list[int]:
        """Entry k: how many drafts had exactly k accepted tokens."""
        histogram = [0] * (max(self.per_step_drafted, default=0) + 1)
        for accepted in self.per_step_accepted:
            histogram[accepted] += 1
        return histogram

    def histograms_by_length(self) -> dict[int, list[int]]:
        """The same of the drafts of each length, which is a tree's number of nodes."""
        histograms = {length: [0] * (length + 1) for length in sorted(set(self.per_step_drafted))}
        for drafted, accepted in zip(self.per_step_drafted, self.per_step_accepted, strict=True):
            histograms[drafted][accepted] += 1
        return histograms

    def report(self) -> dict[str, object]:
        """The ``speculative_decoding`` block."""
        drafts, drafted, accepted = len(self.per_step_drafted), sum(self.per_step_drafted), sum(self.per_step_accepted)
        return {
            "mean_acceptance_length": 1 + accepted / drafts if drafts else 1.0,
            "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
            "acceptance_histogram": self.acceptance_histogram(),
            "acceptance_histogram_by_draft_length": self.histograms_by_length(),
            "num_spec_steps": drafts,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": drafted,
            "num_spec_tokens": max(self.per_step_drafted, default=0),
            "per_step_accepted": list(self.per_step_accepted),
            "per_step_drafted": list(self.per_step_drafted),
        }


@dataclass(frozen=True, slots=True)
class Step:
    """What one pass did for one request.

    kept: offsets, among the ``num_rows`` rows this request fed, of those whose keys stay in the cache.
    tokens: what was emitted, the first ``num_accepted`` of them drafted. pieces: per token the text that became final
    with it; a last piece without a token is text that had been held back.
    """

    request: "Request"
    kept: Sequence[int]
    tokens: tuple[int, ...] = ()
    pieces: tuple[str, ...] = ()
    num_drafted: int = 0
    num_accepted: int = 0
    finish: FinishReason | None = None
    num_rows: int = 0


@dataclass(slots=True, eq=False)
class Request:
    """One completion. Built by the engine; everything that changes, changes in `advance` and `finish_with`.

    prompt: what the text begins with; of an encoder-decoder model, the decoder's text. source: what its encoder reads,
        empty for a decoder-only model. adapter: the target's that writes this text; "" is the target alone.
    max_length: prompt and output together never exceed it (the context). stop_ids: ids that end the text.
    text_stream: None if there is no tokenizer; then stop strings cannot be used.
    reference: extra text to copy from (OpenAI's predicted outputs), as ids; drafters may read it.
    constraint: what the output must look like, in the state after the last token. None: anything goes.
    num_guessed: how many of the last tokens are only guessed and may be taken back. Never any in the engine's own
        requests: it is how a drafter that is itself sped up by a drafter shows that one how far it has come.
    traced: somebody wants to see the drafts; it changes nothing else.
    """

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    rule: Rule
    max_length: int
    stop_ids: frozenset[int] = frozenset()
    text_stream: TextStream | None = None
    reference: tuple[int, ...] = ()
    constraint: Constraint | None = None
    source: Source = ()
    adapter: str = ""
    num_guessed: int = 0
    traced: bool = False
    tokens: list[int] = field(init=False)
    text: str = ""
    finish: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    _held: str = ""  # final text that might yet turn into a stop string

    def __post_init__(self) -> None:
        assert 0 < len(self.prompt) < self.max_length
        self.tokens = list(self.prompt)

    @property
    def num_prompt(self) -> int:
        return len(self.prompt)

    @property
    def num_read(self) -> int:
        """Tokens that the caller's prompt came to: the source's, where it has some."""
        return len(self.source_ids) or self.num_prompt

    @property
    def source_ids(self) -> tuple[int, ...]:
        """The source's tokens; none of a decoder-only model's request, or of one with features."""
        return ids_of(self.source)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_settled(self) -> int:
        """How many of the tokens will stay: all but the guessed ones."""
        return len(self.tokens) - self.num_guessed

    @property
    def room(self) -> int:
        """How many more tokens this request may emit."""
        return min(self.params.max_tokens - self.num_output, self.max_length - len(self.tokens))

    def row_outputs(self, draft: Draft) -> list[list[int]]:
        """For the pending row and each node, the output tokens that stand before the row's choice."""
        output = self.output
        return [output, *(output + list(path) for path in draft.paths())]

    def advance(
        self, num_trunk: int, draft: Draft, verdict: Verdict | None, logprobs: Sequence[TokenLogprob] = ()
    ) -> Step:
        """The commit walk.

        num_trunk: rows fed before the draft's, the pending token's being the last of them. verdict: None for a chunk
        of a prompt, which only fills the cache. logprobs: one per token of path + [token], if asked for.
        """
        if verdict is None:
            return Step(self, kept=range(num_trunk), num_rows=num_trunk)
        run = [*(draft.tokens[node] for node in verdict.path), verdict.token]
        pieces: list[str] = []
        for token in run:
            self.tokens.append(token)
            pieces.append(self._read(token))
            if self.finish:
                break
        emitted = len(pieces)
        self.logprobs.extend(logprobs[:emitted])
        accepted = min(emitted, len(verdict.path))
        self.stats.count(len(draft), accepted)
        rows = verdict.path[: emitted - 1]  # the last emitted token's row is not in the cache yet, or not needed
        kept = range(num_trunk + len(rows)) if rows == tuple(range(len(rows))) else (
            *range(num_trunk), *(num_trunk + node for node in rows))  # fmt: skip
        num_rows = num_trunk + len(draft)
        return Step(self, kept, tuple(run[:emitted]), tuple(pieces), len(draft), accepted, self.finish, num_rows)

    def finish_with(self, reason: FinishReason) -> str:
        """End from outside (abort, error); returns the text that was still held back."""
        if self.finish:
            return ""
        self.finish = reason
        return self._release(self.text_stream.flush() if self.text_stream else "")

    def _read(self, token: int) -> str:
        """Account for one emitted token: its text, and whether the request ends here. The order is plain decoding's."""
        # Within a grammar an end is drawn before min_tokens only where nothing else can follow (`sampling.process`).
        if token in self.stop_ids and (self.num_output > self.params.min_tokens or self.constraint is not None):
            self.finish = FinishReason.STOP
            self.stop_reason = token if token in self.params.stop_token_ids else None
            return self._release(self.text_stream.flush() if self.text_stream else "")
        last = self._limit_at(token)
        if self.text_stream is None:
            self.finish = last
            return ""
        fresh = self.text_stream.feed(token)
        if last:
            fresh += self.text_stream.flush()
        cut = None if last is FinishReason.ERROR else self._stop_string_in(fresh)
        if cut is not None:
            return cut
        if last:
            self.finish = last
            return self._release(fresh)
        return self._hold(fresh)

    def _limit_at(self, token: int) -> FinishReason | None:
        """Why no token may follow this one: the grammar has come to its end, or there is no room."""
        try:
            if self.constraint is not None and self.constraint.advance(token):
                return FinishReason.STOP
        except PilotfishError as error:
            self.error = str(error)
            return FinishReason.ERROR
        return FinishReason.LENGTH if self.room <= 0 else None

    def _stop_string_in(self, fresh: str) -> str | None:
        """If a stop string is complete now, end there: the text up to the earliest one. Text before it is final."""
        window = self._held + fresh
        if self.num_output <= self.params.min_tokens:
            return None
        hits = [(at, stop) for stop in self.params.stop if (at := window.find(stop)) >= 0]
        if not hits:
            return None
        at, stop = min(hits, key=lambda hit: hit[0])
        self.finish, self.stop_reason, self._held = FinishReason.STOP, stop, ""
        shown = window[: at + len(stop)] if self.params.include_stop_str_in_output else window[:at]
        self.text += shown
        return shown

    def _hold(self, fresh: str) -> str:
        """Release all but the longest ending that a stop string could begin with."""
        window = self._held + fresh
        longest = max((len(stop) for stop in self.params.stop), default=1) - 1
        held = next(
            (n for n in range(min(longest, len(window)), 0, -1)
             if any(stop.startswith(window[-n:]) for stop in self.params.stop)), 0)  # fmt: skip
        shown, self._held = window[: len(window) - held], window[len(window) - held :]
        self.text += shown
        return shown

    def _release(self, fresh: str) -> str:
        shown, self._held = self._held + fresh, ""
        self.text += shown
        return shown
