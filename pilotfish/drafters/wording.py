"""Wording: in which tokens a draft model reads a request, and what the tokens that it chooses are to the target.

It does not know models or caches. Three kinds:

`SameTokens`: the draft has the target's vocabulary.
`SharedTokens`: it has another one; the text is read in its own tokens, its law is restricted to those that stand for a
    token of the target, renormalised, and carried as q over the target's ids (token-level intersection, Timor et al.
    2025, arXiv 2502.05202). Exact under every rule, for q is the law that was drawn from.
`SameText`: so little is shared that the draft writes in all of its tokens, the likeliest each; the text is tokenised by
    the target's tokenizer, to tokens that were chosen, not drawn (string-level exact match, same paper).

The one trick: a reading is a run whose text in the draft's own tokens grows beside the tokens it has chosen, so a draft
model that reads itself ahead need not know which kind it is.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from ..decoding.draft import EMPTY, Draft, chain
from ..decoding.request import Request
from ..errors import DraftError, ModelError
from ..lazily import torch
from ..models.translation import Shared, Translator, shared, spelling_out
from .base import Setting
from .drawing import Reduced, Run

if TYPE_CHECKING:
    from torch import Tensor

    from ..models.base import ModelInfo
    from ..models.tokenizer import Tokenizer

Scheme = Literal["auto", "intersection", "text"]
LEAST_COVERAGE = 0.5  # of ordinary text, for drafting in shared tokens only


@dataclass(slots=True, kw_only=True)
class Reading(Run):
    """ids: the text as the draft model reads it, what was chosen included. num_fixed: how many of them stay whatever
    follows, always less than all. num_rows: how many have a row in the cache. own: the draft's ids for the target's,
    None if they are the same."""

    ids: list[int]
    num_fixed: int
    num_rows: int = 0
    own: Mapping[int, int] | None = None
    num_text: int = field(init=False)  # ids before what was chosen

    def __post_init__(self) -> None:
        assert 0 <= self.num_fixed < len(self.ids), (self.num_fixed, len(self.ids))
        self.num_text = len(self.ids)

    def follow(self) -> None:
        """Take up what was chosen since the last time."""
        chosen = self.tokens[len(self.ids) - self.num_text :]
        self.ids += chosen if self.own is None else [self.own[token] for token in chosen]


class Wording(Protocol):
    """What a draft model needs to know of its own vocabulary and the target's."""

    @property
    def rows(self) -> Sequence[int] | None:
        """The draft's ids that it needs logits for; None: all."""

    @property
    def reduced(self) -> Reduced | None:
        """What those logits are for."""

    def begin(self, request: Request, limit: int, probabilistic: bool, past: int) -> Reading | None:
        """A run of at most ``limit`` tokens; None if the draft model cannot read the text now. past: how many of its
        first tokens were read before."""

    def release(self, request: Request) -> None:
        """Forget it."""

    def describe(self) -> str:
        """A few words, empty if there is nothing to say."""


class SameTokens:
    """ids: those that are drafted, ascending; None: all."""

    def __init__(self, draft: ModelInfo, target: ModelInfo, ids: Sequence[int] | None):
        self.num_own, self.num_ids, self.rows = draft.vocab_size, target.vocab_size, ids
        self.reduced = None if ids is None else Reduced(torch.tensor(ids, device=draft.device), target.vocab_size)

    def begin(self, request: Request, limit: int, probabilistic: bool, past: int) -> Reading | None:
        """None where the text, or its source, has an id beyond the draft's table, which may be the shorter one."""
        if self.num_own < self.num_ids:
            unread = request.tokens[past:]
            if max(unread) >= self.num_own or max(request.source_ids, default=0) >= self.num_own:
                return None
        return Reading(request, limit, probabilistic, ids=list(request.tokens), num_fixed=request.num_settled - 1)

    def release(self, request: Request) -> None:
        pass

    def describe(self) -> str:
        return ""


class SharedTokens:
    """ids: of the target, those that may be drafted if they are shared; None: all."""

    def __init__(
        self,
        common: Shared,
        translator: Translator,
        draft: ModelInfo,
        target: ModelInfo,
        ids: Set[int] | None,
    ):
        pairs = [
            (token, own)
            for token, own in zip(common.target_ids, common.draft_ids, strict=True)
            if token < target.vocab_size and own < draft.vocab_size and (ids is None or token in ids)
        ]
        self.own = dict(pairs)
        self.rows = list(self.own.values())
        self.reduced = Reduced(torch.tensor(list(self.own), device=draft.device), target.vocab_size)
        self.common, self.translator = common, translator

    def begin(self, request: Request, limit: int, probabilistic: bool, past: int) -> Reading | None:
        read = self.translator.read(request.id, request.tokens, request.num_settled)
        if read is None:
            return None
        ids, num_fixed = read
        return Reading(request, limit, probabilistic, ids=ids, num_fixed=num_fixed, own=self.own)

    def release(self, request: Request) -> None:
        self.translator.release(request.id)

    def describe(self) -> str:
        fewer = f", {len(self.own)} of them drafted" if len(self.own) < len(self.common) else ""
        return f"{_overlap(self.common, self.translator)}{fewer}, scheme intersection"


@dataclass(slots=True, kw_only=True)
class Writing(Reading):
    """A run whose tokens are the draft's own until `draft` says them in the target's. ends: what ends it."""

    ends: Set[int]
    say: Callable[[Sequence[int]], list[int]]

    @property
    def done(self) -> bool:
        return self.num_left <= 0 or (bool(self.tokens) and self.tokens[-1] in self.ends)

    @property
    def drawn(self) -> bool:
        return False

    def choose(self, logits_V: Tensor) -> int | None:
        """The likeliest: bias, penalties and grammars are about the target's ids, which these are not."""
        return int(logits_V.argmax())

    def draft(self, num_ids: int, device: torch.device) -> Draft:
        tokens = [token for token in self.say(self.tokens) if token < num_ids][: self.limit]
        return chain(tokens) if tokens else EMPTY


class SameText:
    """The draft writes all its tokens that have a text, and what ends one."""

    def __init__(self, common: Shared, translator: Translator, draft: ModelInfo):
        self.common, self.translator = common, translator
        self.texts = translator.draft.token_bytes
        self.ends = {own: token for token, own in common.ends.items()}
        written = {token for token, text in self.texts.items() if text} - draft.eos_ids | self.ends.keys()
        self.rows = sorted(token for token in written if token < draft.vocab_size)
        self.reduced = Reduced(torch.tensor(self.rows, device=draft.device), draft.vocab_size)

    def begin(self, request: Request, limit: int, probabilistic: bool, past: int) -> Reading | None:
        read = self.translator.read(request.id, request.tokens, request.num_settled)
        if read is None:
            return None
        ids, num_fixed = read
        return Writing(
            request, limit, False, ids=ids, num_fixed=num_fixed, ends=self.ends.keys(), say=self.in_target_tokens
        )

    def in_target_tokens(self, own: Sequence[int]) -> list[int]:
        """What was written, up to its last whole character."""
        data = b"".join(self.texts[token] for token in own if token not in self.ends)
        text, _ = codecs.utf_8_decode(data, "replace", False)
        tokens = spelling_out(self.translator.target, text)
        whole = sum(len(self.translator.target.token_bytes[token]) for token in tokens) == len(data)
        return [*tokens, self.ends[own[-1]]] if whole and own[-1] in self.ends else tokens

    def release(self, request: Request) -> None:
        self.translator.release(request.id)

    def describe(self) -> str:
        return f"{_overlap(self.common, self.translator)}, scheme text"


def between(
    tokenizer: Tokenizer, draft: ModelInfo, setting: Setting, scheme: Scheme, ids: Sequence[int] | None
) -> Wording:
    """How a draft model with this tokenizer, which is another than the target's, can draft for it.

    ids: the target's that may be drafted, None: all. Raises DraftError where it cannot, saying why.
    """
    if setting.tokenizer is None:
        raise _refusal(draft, setting, "and without the target's tokenizer they cannot be compared")
    if draft.encoder_decoder:
        raise _refusal(draft, setting, "which is read for decoder-only models only; choose a draft of the same family")
    try:
        common = shared(tokenizer, setting.tokenizer, draft.eos_ids, setting.target.eos_ids)
        translator = Translator(tokenizer, setting.tokenizer, common.specials, draft.vocab_size)
    except ModelError as error:
        raise _refusal(draft, setting, str(error)) from error
    if len(common) == len(common.ends) and scheme != "text":
        way_out = "choose another draft model, or vocabulary_scheme 'text' if they are for the same script"
        raise _refusal(draft, setting, f"and the two have no token in common; {way_out}")
    if scheme == "intersection" or (scheme == "auto" and common.coverage >= LEAST_COVERAGE):
        wording = SharedTokens(common, translator, draft, setting.target, None if ids is None else set(ids))
        if not wording.rows:
            raise _refusal(draft, setting, "and none of the tokens in draft_vocabulary is in both")
        return wording
    if ids is not None:
        raise _refusal(draft, setting, "and drafts text, so a list or number of the target's tokens has no meaning")
    return SameText(common, translator, draft)


def _overlap(common: Shared, translator: Translator) -> str:
    return f"another vocabulary, {len(common)} of {len(translator.target)} tokens shared"


def _refusal(draft: ModelInfo, setting: Setting, why: str) -> DraftError:
    return DraftError(f"draft model {draft.name} has another vocabulary than {setting.target.name}, {why}")
