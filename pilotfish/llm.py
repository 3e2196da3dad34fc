"""LLM: the library's front door. Load a model, generate, stream, chat.

It does not know how decoding works; it turns text into requests, drives `Engine.step`, and turns what is finished
into `Completion`s. The one trick: `generate` and `stream` are the same few lines around the same loop.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from .decoding.request import Request, TextStream, TokenLogprob
from .decoding.sampling import SamplingParams
from .decoding.source import Features
from .drafters import registry
from .engine.controller import Adaptive
from .engine.costs import remember_gain, remembered_gain
from .engine.engine import Engine, Event
from .engine.options import EngineOptions
from .errors import OptionError, PromptError, unknown_name
from .models.load import Loaded, LoadOptions, from_objects, load
from .models.speech import features_of
from .models.tokenizer import Detokenizer, Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
_HEARD = ("input_features", "prompt")  # of a prompt that is a mapping
_WORTH_REMEMBERING = 64  # tokens


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts, as in the OpenAI API."""

    prompt_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished text.

    logprobs: the target's, one per token, if asked for. speculative_decoding: what drafting did, with vLLM's field
    names. finish_reason: stop, length, abort or error; stop_reason: the stop string or stop id that was met.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    usage: Usage
    speculative_decoding: Mapping[str, Any]
    logprobs: tuple[TokenLogprob, ...] | None = None
    stop_reason: int | str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """One step of a stream. token_ids: what was emitted, the first num_accepted of them drafted; pieces: per token the
    text that became final with it. completion: the whole, with the last chunk."""

    token_ids: tuple[int, ...] = ()
    pieces: tuple[str, ...] = ()
    num_drafted: int = 0
    num_accepted: int = 0
    completion: Completion | None = None

    @property
    def text(self) -> str:
        """What became final with this step."""
        return "".join(self.pieces)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during `LLM.generate`. completions: what there was by then, cut short (``abort``) or already finished."""

    def __init__(self, completions: list[Completion]):
        super().__init__("interrupted")
        self.completions = completions


@dataclass(frozen=True, slots=True)
class _Settings:
    load: LoadOptions
    engine: EngineOptions
    speculation: registry.Speculation = field(default_factory=lambda: registry.parse(None))


_Options = TypeVar("_Options", LoadOptions, EngineOptions)


class LLM:
    """A target model, a way to draft for it, and an engine.

    model: a folder, a hub id, a GGUF file or ``demo``. speculative_config: vLLM's keys (``method``, ``model``,
    ``num_speculative_tokens``, ``prompt_lookup_max``, ...); the same keys may be given as keyword arguments, with
    ``draft_model=`` for the config's ``model``. Other options: the fields of `LoadOptions` and `EngineOptions`.

    Raises OptionError for unknown or bad options, ModelError and DraftError for models that do not work here.
    """

    def __init__(
        self, model: str | Path = "demo", *, speculative_config: Mapping[str, Any] | None = None, **options: Any
    ):
        settings = _read_options(speculative_config, options)
        self._start(load(model, **asdict(settings.load)), settings)

    @classmethod
    def from_model(
        cls,
        model: Any,
        tokenizer: Any = None,
        *,
        speculative_config: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> "LLM":
        """Around a loaded Hugging Face model and its tokenizer (None: prompts and results are token ids)."""
        settings = _read_options(speculative_config, options)
        if settings.load != LoadOptions():
            raise OptionError(
                f"{', '.join(f.name for f in fields(LoadOptions))} belong to loading: give them to load()"
            )
        llm = cls.__new__(cls)
        llm._start(model if isinstance(model, Loaded) else from_objects(model, tokenizer), settings)
        return llm

    def _start(self, loaded: Loaded, settings: _Settings) -> None:
        speculation = settings.speculation
        self.tokenizer: Tokenizer | None = loaded.tokenizer
        self.speculation = speculation
        self._inboxes: dict[str, deque[Event]] = {}  # of open streams
        self._num_remembered = 0  # tokens that the record of gains has seen
        self.engine = Engine(
            loaded.model,
            speculation.build,
            settings.engine,
            tokenizer=loaded.tokenizer,
            rule=speculation.common.rule,
            num_speculative_tokens=0 if speculation.method == "none" else speculation.common.num_speculative_tokens,
        )

    # -- using it ------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        references: Sequence[Prompt | None] | None = None,
        adapter: str | Sequence[str | None] | None = None,
    ) -> list[Completion]:
        """Complete prompts (text or token ids), batched; results in the order of the prompts, ``n`` for each.

        A model that hears is given ``{"input_features": [mel bins, frames], "prompt": ..}`` instead: floats, as its
        feature extractor makes them, and as text or ids what the transcript's tokens begin with (by default what
        transformers would have them begin with).

        params: one for all, or one per prompt. references: per prompt, text the answer will resemble (OpenAI's
        predicted outputs), for drafters that copy. adapter: which of the model's ``adapters`` writes, by name, one for
        all or one per prompt; None is the model alone. Raises PromptError and CapacityError before anything runs.
        """
        requests = self._add_all(_as_list(prompts), params, references, adapter)
        try:
            while any(not request.finish for request in requests):
                self._step()
        except KeyboardInterrupt as interrupt:
            for request in requests:
                self.engine.abort(request)
            raise Interrupted([completion(request, i) for i, request in enumerate(requests)]) from interrupt
        finally:  # an error leaves no request behind
            for request in requests:
                self.engine.abort(request)
            self.remember_gain()
        return [completion(request, i) for i, request in enumerate(requests)]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        reference: Prompt | None = None,
        adapter: str | None = None,
    ) -> Iterator[Chunk]:
        """Complete one prompt, chunk by chunk; the last chunk carries the completion. Closing the stream aborts."""
        params = SamplingParams() if params is None else _checked(params)
        if params.n != 1:
            raise OptionError("stream gives one completion; use generate for n > 1")
        (request,) = self._add_all([prompt], params, None if reference is None else [reference], adapter)
        inbox = self._inboxes[request.id] = deque()
        try:
            while inbox or not request.finish:
                if not inbox:
                    self._step()
                while inbox:
                    yield _chunk(inbox.popleft())
        finally:
            del self._inboxes[request.id]
            self.engine.abort(request)
            self.remember_gain()

    def chat(self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None) -> Completion:
        """Answer a conversation (``[{"role": "user", "content": ...}, ...]``) through the model's chat template."""
        return self.generate([self.chat_prompt(messages)], params)[0]

    def chat_prompt(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """The token ids of a conversation, up to where the answer begins.

        tools: that the model may call, as JSON schemas in OpenAI's form. Raises ModelError if the chat template knows
        no tools.
        """
        if self.tokenizer is None:
            raise PromptError("chat needs a tokenizer")
        fine = isinstance(messages, Sequence) and not isinstance(messages, str) and len(messages) > 0
        for one in messages if fine else [messages]:
            if not fine or not isinstance(one, Mapping) or not {"role", "content"} <= one.keys():
                example = '[{"role": "user", "content": "Hello"}]'
                raise PromptError(f"messages are a list such as {example}, not {one!r}")
            if isinstance(one["content"], str):
                _require_unicode(one["content"])
        return self.tokenizer.chat([dict(message) for message in messages], tools)

    def describe(self) -> str:
        """The start-up line: model, method, K and what drafting is expected to gain, acceptance rule."""
        info, engine = self.engine.target.info, self.engine
        dtype = str(info.dtype).removeprefix("torch.") if info.quantization == "none" else info.quantization
        about = engine.drafter.describe()
        method = self.speculation.method + (f" ({about})" if about else "")
        drafting = "" if self.speculation.method == "none" else f", K {engine.num_speculative_tokens}{self._outlook()}"
        return f"{info.name} ({dtype}, {info.device}) | method {method}{drafting} | rule {engine.rule} | lossless"

    @property
    def predicted_gain(self) -> float | None:
        """Tokens per second over plain decoding's so far, as the controller reckons; None before there are any, and
        where the number of drafted tokens is fixed."""
        controller = self.engine.controller
        return controller.predicted_gain if isinstance(controller, Adaptive) and controller.num_judged else None

    def remember_gain(self) -> None:
        """Note what drafting gained since the last note, for the start-up line of later runs, if that is worth a file.
        `generate` and `stream` do it themselves; whoever drives the engine by hand may."""
        controller, gain = self.engine.controller, self.predicted_gain
        if isinstance(controller, Adaptive) and gain is not None:
            fresh = controller.num_judged - self._num_remembered
            if fresh >= _WORTH_REMEMBERING:
                remember_gain(self.engine.target, self._drafting_name, gain, fresh)
                self._num_remembered = controller.num_judged

    # -- inside --------------------------------------------------------------------------------------------------

    def _outlook(self) -> str:
        controller = self.engine.controller
        if not isinstance(controller, Adaptive):
            return ""
        ratio = controller.costs.seconds(8) / controller.costs.seconds(1)
        gain = remembered_gain(self.engine.target, self._drafting_name)
        promise = "gain not known yet" if gain is None else f"predicted gain {gain:.2f} x, as in earlier runs"
        return f" (8 rows cost {ratio:.2f} of 1; {promise})"

    @property
    def _drafting_name(self) -> str:
        return f"{self.speculation.method} {self.engine.drafter.describe()}"

    def _step(self) -> None:
        """One step for everybody: the events of other open streams wait until those are read on."""
        for event in self.engine.step():
            if event.request.id in self._inboxes and (event.tokens or event.finish):
                self._inboxes[event.request.id].append(event)

    def _add_all(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        references: Sequence[Prompt | None] | None,
        adapter: str | Sequence[str | None] | None,
    ) -> list[Request]:
        if isinstance(params, Sequence) and not isinstance(params, str):
            each = [_checked(one) for one in params]
        else:
            each = [SamplingParams() if params is None else _checked(params)] * len(prompts)
        if references is not None and (isinstance(references, str) or not isinstance(references, Sequence)):
            raise OptionError(f"references must be a list, a text (or None) for each prompt, not {references!r}")
        hints = [None] * len(prompts) if references is None else list(references)
        alone = adapter is None or isinstance(adapter, str) or not isinstance(adapter, Sequence)
        adapters: list[Any] = [adapter] * len(prompts) if alone else list(adapter or ())
        for name, values in (("params", each), ("references", hints), ("adapters", adapters)):
            if len(values) != len(prompts):
                raise OptionError(f"{len(prompts)} prompts but {len(values)} {name}: give one for each")
        requests: list[Request] = []
        try:
            for prompt, own, hint, adapted in zip(prompts, each, hints, adapters, strict=True):
                ids, heard = self._parts(prompt)
                requests += self.engine.add(
                    ids,
                    own,
                    source=heard,
                    text_stream=None if self.tokenizer is None else self._text_stream,
                    reference=[] if hint is None else self._ids(hint, special=False),
                    adapter=adapted,
                )
        except Exception:
            for request in requests:
                self.engine.abort(request)
            raise
        return requests

    def _text_stream(self) -> TextStream:
        assert self.tokenizer is not None
        return Detokenizer(self.tokenizer)

    def _parts(self, prompt: Prompt) -> tuple[list[int], Features | None]:
        """What the text begins with, or what is to be read; and what is to be heard, if anything is."""
        if not isinstance(prompt, Mapping) or "input_features" not in prompt:
            return self._ids(prompt), None
        for key in prompt:
            if key not in _HEARD:
                raise unknown_name("key of a prompt", str(key), _HEARD)
        beginning = prompt.get("prompt")
        return [] if beginning is None else self._ids(beginning, special=False), features_of(prompt["input_features"])

    def _ids(self, prompt: Prompt, *, special: bool = True) -> list[int]:
        if not isinstance(prompt, str):
            return _listed(prompt)
        if self.tokenizer is None:
            raise PromptError("this model has no tokenizer: give prompts as token ids")
        _require_unicode(prompt)
        return self.tokenizer.encode(prompt, add_special_tokens=special)


def _require_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair, from a text cut or decoded wrongly
        raise PromptError(f"the text {text[:40]!r} is not Unicode: {error.reason} at {error.start}") from error


def completion(request: Request, index: int = 0) -> Completion:
    """What became of a finished request."""
    assert request.finish is not None
    return Completion(
        index=index,
        text=request.text,
        token_ids=tuple(request.output),
        finish_reason=str(request.finish),
        usage=Usage(request.num_read, request.num_output),
        speculative_decoding=request.stats.report(),
        logprobs=tuple(request.logprobs) if request.params.logprobs is not None else None,
        stop_reason=request.stop_reason,
        error=request.error,
    )


def _chunk(event: Event) -> Chunk:
    done = completion(event.request) if event.finish else None
    return Chunk(event.tokens, event.pieces, event.num_drafted, event.num_accepted, done)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (isinstance(prompts, Mapping) and "input_features" in prompts):
        return [prompts]
    items = _listed(prompts)
    return [items] if items and all(isinstance(item, int) for item in items) else items


def _checked(params: Any) -> SamplingParams:
    if not isinstance(params, SamplingParams):
        raise OptionError(f"params must be SamplingParams(...) or a list of them, one for each prompt, not {params!r}")
    return params


def _listed(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        raise PromptError(
            f"a prompt is a text or a list of token ids, not {value!r}; only for a model that hears it is a mapping, "
            "with 'input_features'"
        )
    if isinstance(value, (bytes, bytearray, Set)):  # iterable, but what comes out is no list of ids
        raise PromptError(f"a prompt is a text or a list of token ids, not {value!r}")
    try:
        return list(value)
    except TypeError:
        raise PromptError(f"a prompt is a text or a list of token ids, not {value!r}") from None


def _read_options(config: Mapping[str, Any] | None, options: Mapping[str, Any]) -> _Settings:
    """Sort keyword arguments to their owners. Raises OptionError for one that nobody knows."""
    own = {f.name for f in fields(LoadOptions)} | {f.name for f in fields(EngineOptions)}
    speculative = {"method": "method"} | registry.keywords() | {alias: alias for alias in registry.ALIASES}
    if config is not None and not isinstance(config, Mapping):
        raise OptionError(f"speculative_config must be a mapping such as {{'method': 'ngram'}}, not {config!r}")
    drafting: dict[str, Any] = dict(config or {})
    for key, value in options.items():
        if key in own:
            continue
        if key not in speculative:
            raise unknown_name("option", key, own | set(speculative) | {"speculative_config"})
        name = speculative[key]
        if name in drafting:
            raise OptionError(f"{key!r} is given twice, in speculative_config and as an argument")
        drafting[name] = value
    return _Settings(_pick(LoadOptions, options), _pick(EngineOptions, options), registry.parse(drafting))


def _pick(kind: type[_Options], options: Mapping[str, Any]) -> _Options:
    return kind(**{f.name: options[f.name] for f in fields(kind) if f.name in options})
