"""An independent, smaller model that runs ahead: the drafter of Leviathan et al. 2023 and Chen et al. 2023.

It does not know the target. It has a paged cache of its own, of the same class, and batches over requests. The one
trick: it has no phases. It remembers which tokens' rows lie in its cache, and a pass feeds what the text has beyond
them, be that a prompt, the replacement of a rejected tail, or the token it has just chosen. What its text is, and what
its choices mean, is its wording: it may have another vocabulary than the target (see `wording`).

    its cache   [ committed: the settled text | scratch: its own guesses, as far as they were fed ]
                                      length ─^   those that turn out right are committed next time
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..decoding.draft import EMPTY, Draft
from ..decoding.request import Request
from ..decoding.sampling import Likeliest
from ..errors import DraftError, OptionError
from ..models import vocabulary
from ..models.options import GGUF, bits_of
from ..models.tokenizer import mismatch
from ..paged.batch import Feed, lay_out
from .base import Drafter, Setting
from .drawing import Run, extend
from .wording import Reading, SameTokens, Scheme, between

if TYPE_CHECKING:
    from torch import Tensor

    from ..models.base import CausalLM, ModelInfo
    from ..models.load import Loaded
    from ..models.tokenizer import Tokenizer
    from .wording import Wording

LISTED = 32768  # tokens drafted, if a list is given and no number


@dataclass(frozen=True, slots=True)
class DraftModelOptions:
    """Raises OptionError for values out of range."""

    model: Any = field(
        default=None, metadata={"help": "the draft model: a folder, a hub id, or `demo`", "flag": "draft_model"}
    )
    quantization: Literal["auto", "none", "int8", "int4", "gguf"] = field(
        default="auto",
        metadata={
            "help": "weights of a draft model given by name; auto: as the target's, int8 instead of gguf for a folder",
            "flag": "draft_quantization",
        },
    )
    draft_sample_method: Literal["probabilistic", "greedy"] = field(
        default="probabilistic", metadata={"help": "draw drafts from q, or take its likeliest token"}
    )
    max_model_len: int | None = field(
        default=None, metadata={"help": "no drafting beyond this many tokens", "flag": "draft_max_model_len"}
    )
    draft_vocabulary: Any = field(
        default=None, metadata={"help": "a list of frequent tokens, made by tune: only these are drafted"}
    )
    draft_vocab_size: int | None = field(
        default=None,
        metadata={"help": f"draft so many tokens only: those of the list ({LISTED} if unset), then the lowest ids"},
    )
    vocabulary_scheme: Scheme = field(
        default="auto",
        metadata={
            "help": "a draft with another vocabulary drafts what both share (intersection) or text, tokenised anew; "
            "auto: text where they share too little"
        },
    )

    def __post_init__(self) -> None:
        quantised = self.quantization != "auto" and bits_of(self.quantization) > 0
        if quantised and not isinstance(self.model, str | Path | None):
            raise OptionError("quantization is for a draft model given by name; this one is loaded already")
        if self.draft_sample_method not in ("probabilistic", "greedy"):
            raise OptionError(
                f"draft_sample_method must be 'probabilistic' or 'greedy', not {self.draft_sample_method!r}"
            )
        if self.vocabulary_scheme not in ("auto", "intersection", "text"):
            raise OptionError(
                f"vocabulary_scheme must be 'auto', 'intersection' or 'text', not {self.vocabulary_scheme!r}"
            )
        longest = self.max_model_len
        if longest is not None and (isinstance(longest, bool) or not isinstance(longest, int) or longest < 1):
            raise OptionError(f"max_model_len must be 1 or more, not {longest!r}")
        size = self.draft_vocab_size
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise OptionError(f"draft_vocab_size must be a whole number from 1, not {size!r}")
        if not isinstance(self.draft_vocabulary, str | Path | None):
            raise OptionError(f"draft_vocabulary must name a file that tune made, not {self.draft_vocabulary!r}")

    def loading(self, target: ModelInfo) -> Literal["none", "int8", "int4", "gguf"]:
        """The quantization to load the draft model with."""
        if self.quantization != "auto":
            return self.quantization
        if target.quantization == GGUF:
            return "gguf" if Path(str(self.model)).suffix == ".gguf" else "int8"
        return "int8" if target.quantization == "int8" else "int4" if target.quantization == "int4" else "none"


class DraftModelDrafter(Drafter):
    """tokenizer: the draft model's, if its vocabulary is not the target's. num_passes: of the draft model, so far."""

    Options = DraftModelOptions

    def __init__(
        self,
        model: CausalLM,
        setting: Setting,
        options: DraftModelOptions | None = None,
        tokenizer: Tokenizer | None = None,
    ):
        self.options = options or DraftModelOptions()
        _refuse_other_kind(model.info, setting.target)
        self.wording = self._words(model.info, setting, tokenizer)
        rows, self.reduced = self.wording.rows, self.wording.reduced
        self.model = model if rows is None else vocabulary.with_head(model, rows)
        self.num_target_ids, self.device = setting.target.vocab_size, setting.target.device
        self.max_rows = setting.max_rows
        self.context = min(model.info.context, self.options.max_model_len or model.info.context)
        num_pages = -(-setting.num_cache_tokens // setting.page_size) + setting.max_num_seqs
        self.cache = model.new_cache(num_pages, setting.page_size)
        self.num_passes = 0
        self._scratch: dict[str, list[int]] = {}  # per sequence the tokens whose rows lie behind its length

    @classmethod
    def build(cls, options: Any, setting: Setting) -> DraftModelDrafter:
        loaded = load_draft(options, setting, "draft_model")
        return cls(loaded.model, setting, options, loaded.tokenizer)

    def _words(self, draft: ModelInfo, setting: Setting, tokenizer: Tokenizer | None) -> Wording:
        if tokenizer is not None:
            ids = drafted_ids(self.options, setting.target.vocab_size, setting)
            return between(tokenizer, draft, setting, self.options.vocabulary_scheme, ids)
        ids = drafted_ids(self.options, min(draft.vocab_size, setting.target.vocab_size), setting)
        return SameTokens(draft, setting.target, ids)

    def describe(self) -> str:
        name = self.model.info.name
        if (about := self.wording.describe()) or self.reduced is None:
            return f"{name}, {about}" if about else name
        which = "the lowest" if self.options.draft_vocabulary is None else "the most frequent"
        return f"{name}, {which} {len(self.reduced.ids_M)} of {self.num_target_ids} tokens"

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Draft]:
        runs = [self._begin(request, limit, requests) for request, limit in zip(requests, limits, strict=True)]
        active = [run for run in runs if run is not None]
        while active:
            self._advance(active)
            active = [run for run in active if not run.done]
        for run in runs:
            if run is not None:
                length = self.cache.length(run.request.id)
                self._scratch[run.request.id] = run.ids[length : run.num_rows]
        return [EMPTY if run is None else run.draft(self.num_target_ids, self.device) for run in runs]

    def release(self, request: Request) -> None:
        self._close(request.id)
        self.wording.release(request)

    def guess(self, runs: Sequence[Run]) -> list[Sequence[int]]:
        """What each run will choose next, fewer tokens than it has left; here nobody knows."""
        return [()] * len(runs)

    def _begin(self, request: Request, limit: int, wanted: Sequence[Request]) -> Reading | None:
        """Open or find the request's sequence and make room; None if this request cannot be drafted for now."""
        if self.model.info.refusal(request.source) is not None:
            return None
        past = self.cache.length(request.id) if request.id in self.cache else 0
        probabilistic = self.options.draft_sample_method == "probabilistic"
        run = self.wording.begin(request, limit, probabilistic, past)
        if run is None or run.num_text >= self.context:
            return None
        run.limit = min(limit, self.context - run.num_text)  # the last guess is never fed
        if request.id not in self.cache:
            self.cache.open(request.id, run.ids[: run.num_fixed + 1], request.source)  # what it finds is committed
        self._keep_scratch(run)
        behind = run.num_text + run.limit - 1 - self.cache.length(request.id)
        if not self.cache.reserve(request.id, behind):
            self._close_idle(wanted)
            if not self.cache.reserve(request.id, behind):
                return None
        return run

    def _keep_scratch(self, run: Reading) -> None:
        """Rows that are there already: the committed ones, and of the scratch those that the text bears out."""
        run.num_rows = self.cache.length(run.request.id)
        for token in self._scratch.pop(run.request.id, ()):
            if run.num_rows == run.num_text - 1 or run.ids[run.num_rows] != token:
                break  # also before the last one: it is fed, for its logits are wanted
            run.num_rows += 1
        self._commit(run)

    def _close(self, sequence: str) -> None:
        self.cache.release(sequence)
        self._scratch.pop(sequence, None)

    def _close_idle(self, wanted: Sequence[Request]) -> None:
        keep = {request.id for request in wanted}
        for sequence in [name for name in self.cache.sequences if name not in keep]:
            self._close(sequence)

    def _advance(self, runs: Sequence[Reading]) -> None:
        """One pass of at most max_rows rows. Runs whose text is read to its end choose; the others get on reading."""
        feeds: list[Feed] = []
        choosing: list[Reading] = []
        guesses: list[Sequence[int]] = []
        budget = self.max_rows
        for run, guess in zip(runs, self.guess(runs), strict=True):
            unread = run.ids[run.num_rows : run.num_rows + budget] if budget > 0 else []
            if not unread:
                continue
            budget -= len(unread)
            feed = Feed(run.request.id, unread, run.num_rows, 0)
            run.num_rows += len(unread)
            if run.num_rows == len(run.ids):
                guess = guess[:budget]
                budget -= len(guess)
                feed = Feed(feed.sequence, [*unread, *guess], feed.past, len(guess) + 1)
                choosing.append(run)
                guesses.append(guess)
            feeds.append(feed)
        logits_NV, best = self._forward(feeds)
        for run in runs:
            self._commit(run)
        extend(choosing, guesses, logits_NV, self.reduced, best)
        for run in choosing:
            run.follow()
            run.num_rows = len(run.ids) - 1  # right guesses have been read

    def _commit(self, run: Reading) -> None:
        """What was read of the settled text stays, but for its last token: this very text may be asked for again."""
        length = self.cache.length(run.request.id)
        self.cache.commit(run.request.id, range(min(run.num_rows, run.num_fixed) - length), run.ids)

    def _forward(self, feeds: list[Feed]) -> tuple[Tensor, Likeliest | None]:
        self.num_passes += 1
        output = self.model.forward(lay_out(feeds, self.cache, self.model.info.device), self.cache)
        if self.reduced is not None or self.model.info.vocab_size <= self.num_target_ids:
            return output.logits_NV, output.best
        return output.logits_NV[:, : self.num_target_ids], None  # a table that is padded further has no more tokens


def drafted_ids(options: DraftModelOptions, num_ids: int, setting: Setting) -> tuple[int, ...] | None:
    """The target's ids under ``num_ids`` that the draft model may propose, ascending; None: all. Raises OptionError for
    a file that is no list of tokens, DraftError for one of another vocabulary."""
    if options.draft_vocabulary is None and options.draft_vocab_size is None:
        return None
    listed = None
    if options.draft_vocabulary is not None:
        path = Path(options.draft_vocabulary).expanduser()
        listed = vocabulary.read(path)
        vocabulary.check(listed, path, setting.tokenizer, setting.target)
    ids = vocabulary.choose(listed, options.draft_vocab_size or LISTED, num_ids, setting.target.eos_ids)
    return ids if len(ids) < num_ids else None


def _refuse_other_kind(draft: ModelInfo, target: ModelInfo) -> None:
    """Raises DraftError for a decoder-only draft of an encoder-decoder target, the reverse, and one that reads another
    kind of source."""
    if draft.encoder_decoder != target.encoder_decoder:
        kinds = {True: "an encoder-decoder", False: "decoder-only"}
        raise DraftError(
            f"draft model {draft.name} is {kinds[draft.encoder_decoder]} and {target.name} is "
            f"{kinds[target.encoder_decoder]}: they do not read the same text; choose a draft of the same kind"
        )
    if draft.reads != target.reads:
        raise DraftError(
            f"draft model {draft.name} reads {draft.reads} and {target.name} reads {target.reads}: choose a draft that "
            "reads the same"
        )


def load_named(options: DraftModelOptions, target: ModelInfo) -> Loaded:
    """The draft model that is given by name: on the target's device, and run by its kernels. Raises ModelError."""
    from ..models.load import load

    quantization = options.loading(target)
    kernels = target.kernels if bits_of(quantization) else "auto"  # float weights are run by neither
    return load(options.model, device=str(target.device), quantization=quantization, kernels=kernels)


def load_draft(options: DraftModelOptions, setting: Setting, method: str) -> Loaded:
    """The draft model, and its tokenizer if that is another than the target's; where either has none, their ids are
    taken to be the same. Raises DraftError if there is no draft model, or none of the target's kind."""
    if options.model is None:
        raise DraftError(f"method {method!r} needs a draft model: give model= (or --draft-model)")
    from ..models.load import Loaded, from_objects

    if isinstance(options.model, Loaded):
        loaded = options.model
    elif isinstance(options.model, str | Path):
        _refuse_head(Path(options.model), method)
        loaded = load_named(options, setting.target)
    else:
        from transformers import PreTrainedModel

        if not isinstance(options.model, PreTrainedModel):  # as Hugging Face's assistant_model
            raise DraftError(f"a draft model is given by name, as a folder or loaded, not as {options.model!r}")
        loaded = from_objects(options.model)
    _refuse_other_kind(loaded.model.info, setting.target)
    if setting.tokenizer is None or loaded.tokenizer is None:
        if options.vocabulary_scheme != "auto":
            without = setting.target if setting.tokenizer is None else loaded.model.info
            raise DraftError(
                f"vocabulary_scheme {options.vocabulary_scheme!r} compares two vocabularies, and {without.name} came "
                "without a tokenizer; give it one"
            )
        return Loaded(loaded.model, None)
    differ = mismatch(loaded.tokenizer, setting.tokenizer) is not None
    return Loaded(loaded.model, loaded.tokenizer if differ else None)


def _refuse_head(folder: Path, method: str) -> None:
    """Raises DraftError for a folder that holds a trained head: that is no model, and has methods of its own."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return  # whoever loads it as a model says what is wrong
    from ..heads.store import kind_of

    kind = kind_of(config) if isinstance(config, dict) else None
    if kind is not None:
        raise DraftError(f"{folder} is a trained head, no draft model: use method {kind!r} instead of {method!r}")
