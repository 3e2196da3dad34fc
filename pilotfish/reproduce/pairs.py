"""What is measured: targets, and what drafts for each. Language models by name, and the pair that is trained here.

It does not measure. The one trick: a pair is only named until it is opened, so two large targets are never in memory at
once.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from ..models.load import DEMO, Loaded, load
from ..train.progress import Progress
from . import spoken
from .options import ReproduceOptions
from .prompts import halves, prompts_for
from .spoken_pair import Lesson, trained

Kind = Literal["demo", "given", "spoken"]  # what comes along, the user's own, what is trained here
SPOKEN = "spoken words"
_TOKENS_OF_PROMPT = 60  # that an answer has at least, usually
_LINES, _WORDS = 4000, 8


@dataclass(frozen=True, slots=True)
class Opened:
    """A pair in memory. configs: {what a drafter is called: its speculative config}. prompts: measured on, as ids;
    others: whose answers count models are made of. notes: what is known of how it was trained, if it was here."""

    target: Loaded
    configs: Mapping[str, Mapping[str, Any]]
    prompts: list[list[int]]
    others: list[list[int]]
    notes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Pair:
    """key: of its values in the record: everything that they depend on. counts: whether unigrams and bigrams draft too.
    max_tokens: of an answer."""

    name: str
    kind: Kind
    key: str
    open: Callable[[], Opened]
    counts: bool = False
    max_tokens: int = 96


def pairs_of(options: ReproduceOptions, work: Path, keep: Callable[[str, Callable[[], Any]], Any]) -> list[Pair]:
    """All that were asked for. keep: remembers what is expensive and no result (`Journal.once`)."""
    weights, size = _weights(options), f", {options.tokens} tokens"  # which also count models are made of
    found = [
        Pair(
            "SmolLM2-135M",
            "demo",
            f"{DEMO} {weights} {_prompts_key(options)}{size}",
            lambda: _language(options, DEMO, _own_drafters(), keep, weights),
            counts=True,
        )
    ]
    if options.model is not None and options.draft_model is not None:
        name, draft = Path(options.model).name, Path(options.draft_model).name
        found.append(
            Pair(
                name,
                "given",
                f"{name} {draft} {weights} {_prompts_key(options)}{size}",
                lambda: _two_models(options, draft, keep, weights),
            )
        )
    found.append(Pair(SPOKEN, "spoken", f"{SPOKEN}{size}", lambda: open_spoken(work), counts=True))
    return found


def open_spoken(work: Path) -> Opened:
    """The encoder-decoder pair, trained first if it is not there yet."""
    words = spoken.cmu()
    with ExitStack() as stack:
        loaded, about = trained(work / "spoken", _bars(stack), lambda: words)
    measured, others = halves(words.tests(_LINES, _WORDS).sources)
    name = f"T5, {about['draft']['parameters'] / 1e6:.1f} M"
    configs = {name: {"method": "draft_model", "model": loaded["draft"]}}
    return Opened(loaded["target"], configs, measured, others, dict(about.items()))


@contextmanager
def one_thread() -> Iterator[None]:
    """For models of a few million parameters: their products gain nothing from more threads, and each pass would wait
    for them a hundred times."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _own_drafters() -> dict[str, dict[str, Any]]:
    """What the demo model can draft with: chains, as in the paper, not trees."""
    return {
        "layer_skip": {"method": "layer_skip"},
        "eagle3 head": {"method": "eagle3", "tree_width": 1},
        "medusa heads": {"method": "medusa", "tree": [[0] * depth for depth in (1, 2, 3, 4)]},
    }


def _language(
    options: ReproduceOptions,
    name: str,
    configs: Mapping[str, Mapping[str, Any]],
    keep: Callable[[str, Callable[[], Any]], Any],
    weights: str,
) -> Opened:
    target = load(name, quantization=_quantization(weights))
    num_wanted = max(2 * options.timed_prompts, 2 * -(-options.tokens // _TOKENS_OF_PROMPT))
    key = f"prompts {target.model.info.name} {weights} {_prompts_key(options)} {num_wanted}"
    prompts = keep(key, lambda: prompts_for(target, options.prompts, num_wanted))
    return Opened(target, configs, *halves(prompts))


def _two_models(
    options: ReproduceOptions, draft_name: str, keep: Callable[[str, Callable[[], Any]], Any], weights: str
) -> Opened:
    assert options.model is not None and options.draft_model is not None
    draft = load(options.draft_model, quantization=_quantization(weights))
    config = {"method": "draft_model", "model": draft}
    return _language(options, options.model, {draft_name: config}, keep, weights)


def _weights(options: ReproduceOptions) -> str:
    if options.quantization != "auto":
        return options.quantization
    return "none" if torch.cuda.is_available() else "int8"


def _quantization(weights: str) -> Literal["none", "int8", "int4"]:
    assert weights in ("none", "int8", "int4")
    return weights  # type: ignore[return-value]


def _prompts_key(options: ReproduceOptions) -> str:
    return "own prompts" if options.prompts is None else Path(options.prompts).name


def _bars(stack: ExitStack) -> Callable[[Lesson], None]:
    """A bar for each training, gone with the stack."""
    bars: dict[str, Progress] = {}

    def watch(lesson: Lesson) -> None:
        if lesson.role not in bars:
            bar = Progress(f"training the {lesson.role}", lesson.schedule.num_steps, lesson.step)
            bars[lesson.role] = stack.enter_context(bar)
        bars[lesson.role].show(lesson.step, f"loss {lesson.loss:.3f}")

    return watch
