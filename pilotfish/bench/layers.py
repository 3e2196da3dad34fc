"""`pilotfish tune layer_skip`: which of its own layers a target can do without while it drafts for itself.

It does not know architectures: the model runs the layers it is asked for. The one trick: a subset is judged on the
target's own answers, all places of a text in one pass, so trying one costs a pass and no decoding. Layers go one by
one, each time the one that is missed least (greedy, where Zhang et al. 2023, arXiv 2309.08168, search by Bayesian
optimisation); what each size is worth follows from its acceptance and its share of a pass.

A pass judged like this sees keys that the subset itself made of the whole text, where drafting sees the target's own up
to the draft: acceptance is a little too low, the order is right. The bench has the last word.
"""

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..decoding.sampling import SamplingParams
from ..decoding.source import Source
from ..decoding.theory import best_num_drafted, walltime_factor
from ..engine.costs import measured
from ..engine.options import EngineOptions
from ..errors import OptionError
from ..llm import LLM
from ..models.base import CausalLM
from ..models.load import Loaded
from ..paged.batch import Feed, lay_out
from ..paged.cache import KVCache
from .options import TuneOptions
from .prompts import read_prompts
from .report import new_console

_NEW_TOKENS = 48
_ROWS = 320  # places that are judged: their laws are all in memory at once
_LONGEST = 512  # tokens of a text, its last ones
_TRIED = 6  # layers that may go next: those that were missed least the last time
_LEAST = 0.05  # acceptance below which no further layer goes
_MOST_DRAFTED = 8
_TIMINGS = 5


@dataclass(frozen=True, slots=True)
class Subset:
    """skipped: layers left out. acceptance: of a token drafted without them. cost: of a pass, in passes of all layers.
    num_drafted, speedup: the best number of tokens to draft and what that is predicted to gain."""

    skipped: tuple[int, ...]
    acceptance: float
    cost: float
    num_drafted: int
    speedup: float

    def describe(self) -> str:
        return (
            f"without layers {', '.join(map(str, self.skipped))}: acceptance {self.acceptance:.2f}, cost "
            f"{self.cost:.2f}, predicted {self.speedup:.2f} x at K = {self.num_drafted}"
        )


@dataclass(frozen=True, slots=True)
class _Text:
    """ids: the last one is only ever guessed. num_judged: places, from the end. source: what an encoder reads."""

    ids: list[int]
    num_judged: int
    source: Source = ()


class Trial:
    """Judges subsets of a model's layers on texts. temperature 0: how often the likeliest token is the same; above it:
    the shared mass of both laws."""

    def __init__(self, model: CausalLM, texts: Sequence[_Text], temperature: float):
        self.model, self.texts, self.temperature = model, texts, temperature
        self.num_layers = len(model.info.layers)
        self._cache = self._room()
        self._laws = self._run(range(self.num_layers))
        self._whole, self._layer = self._times()

    def acceptance(self, skipped: Sequence[int]) -> float:
        theirs, ours = self._laws, self._run([layer for layer in range(self.num_layers) if layer not in skipped])
        if self.temperature == 0:
            return float((theirs == ours).float().mean())
        return float(theirs.minimum(ours).sum(1).mean())

    def cost(self, num_skipped: int) -> float:
        return max(self._whole - num_skipped * self._layer, self._layer) / self._whole

    def _room(self) -> KVCache:
        pages = max(len(text.ids) for text in self.texts)
        cache = self.model.new_cache(len(self.texts), pages)
        cache.prefix_sharing = False
        for number, text in enumerate(self.texts):
            cache.open(str(number), text.ids, text.source)
            cache.reserve(str(number), len(text.ids))
        return cache

    @torch.inference_mode()
    def _run(self, layers: Sequence[int]) -> Tensor:
        """Likeliest tokens [N], or laws [N, V]. Nothing is committed: the next run writes over these rows."""
        found = []
        for number, text in enumerate(self.texts):
            feed = Feed(str(number), text.ids[:-1], 0, text.num_judged)
            batch = lay_out([feed], self._cache, self.model.info.device)
            logits_NV = self.model.forward(batch, self._cache, layers=list(layers)).logits_NV
            if self.temperature == 0:
                found.append(logits_NV.argmax(1))
            else:
                found.append(torch.softmax(logits_NV.float() / self.temperature, 1))
        return torch.cat([part.cpu() for part in found])

    def _times(self) -> tuple[float, float]:
        """Seconds of a pass over one row, and of one layer of it."""
        half = list(range(self.num_layers // 2))
        best = {len(half): float("inf"), self.num_layers: float("inf")}
        for _ in range(_TIMINGS):
            for layers in (half, list(range(self.num_layers))):
                batch = lay_out([Feed("0", self.texts[0].ids[:1], 0, 1)], self._cache, self.model.info.device)
                started = time.perf_counter()
                float(self.model.forward(batch, self._cache, layers=layers).logits_NV[0, 0])
                best[len(layers)] = min(best[len(layers)], time.perf_counter() - started)
        whole, part = best[self.num_layers], best[len(half)]
        return whole, max(whole - part, whole * 1e-3) / (self.num_layers - len(half))


def search(trial: Trial, verify: Sequence[float], say: Callable[[str], None] = lambda _line: None) -> list[Subset]:
    """Subsets of every size worth looking at, in the order in which layers went. verify: see `best_num_drafted`."""
    skipped: list[int] = []
    found: list[Subset] = []
    order = list(range(trial.num_layers))
    while len(skipped) < trial.num_layers - 1:
        scores = {layer: trial.acceptance([*skipped, layer]) for layer in order[: _TRIED if found else None]}
        order = sorted(scores, key=lambda layer: -scores[layer]) + [one for one in order if one not in scores]
        layer = order.pop(0)
        if scores[layer] < _LEAST:
            break
        skipped.append(layer)
        found.append(_judged(tuple(sorted(skipped)), scores[layer], trial.cost(len(skipped)), verify))
        say(found[-1].describe())
    return found


def best_layers(options: TuneOptions, target: Loaded, engine: EngineOptions) -> dict[str, Any]:
    """The config of the best subset, which is also written beside ``options.out``. Raises OptionError if there is no
    layer to leave out, or the file cannot be written."""
    num_layers = len(target.model.info.layers)
    if num_layers < 2:
        raise OptionError("the target has a single layer, so there is none to leave out")
    path = Path(options.out).expanduser().absolute().with_suffix(".layers.json")
    if not path.parent.is_dir():
        raise OptionError(f"{path} cannot be written: there is no folder {path.parent}")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise OptionError(f"{path} cannot be written; name another file with --out")
    costs = measured(target.model)
    verify = [costs.seconds(rows) / costs.seconds(1) for rows in range(1, _MOST_DRAFTED + 2)]
    screen = new_console()
    found = search(
        Trial(target.model, _own_texts(options, target, engine), options.temperature),
        verify,
        lambda line: screen.print(line, highlight=False),
    )
    if not found:
        raise OptionError("this target cannot draft without any one of its layers; use another method")
    best = max(found, key=lambda subset: subset.speedup)
    config = {"method": "layer_skip", "skip_layers": list(best.skipped)}
    path.write_text(json.dumps(config) + "\n", encoding="utf-8")
    screen.print(f"the best is in {path}; now it is measured", highlight=False)
    return config


def _judged(skipped: tuple[int, ...], acceptance: float, cost: float, verify: Sequence[float]) -> Subset:
    """At least one token is drafted: not to draft is not a subset."""
    best = max(1, best_num_drafted(acceptance, cost, verify=verify))
    return Subset(skipped, acceptance, cost, best, walltime_factor(acceptance, best, cost, verify[best]))


def _own_texts(options: TuneOptions, target: Loaded, engine: EngineOptions) -> list[_Text]:
    """Prompts with the target's answers, as many as have _ROWS places together."""
    llm = LLM.from_model(target, max_model_len=engine.max_model_len, max_num_batched_tokens=2048)
    info = target.model.info
    longest = info.source_context or llm.engine.max_length - 1
    prompts = [ids for ids in (one.ids(target.tokenizer) for one in read_prompts(options.prompts, options.limit))
               if 0 < len(ids) <= longest]  # fmt: skip
    params = SamplingParams(temperature=options.temperature, max_tokens=_NEW_TOKENS, seed=options.seed or 0)
    texts: list[_Text] = []
    for ids, answer in zip(prompts, llm.generate(prompts, params), strict=True):
        source, beginning = info.opening(ids)
        text = [*beginning, *answer.token_ids][-_LONGEST:]
        num_judged = min(len(answer.token_ids), len(text) - 1, _ROWS - sum(one.num_judged for one in texts))
        if num_judged > 0:
            texts.append(_Text(text, num_judged, source))
    if not texts:
        raise OptionError("none of the prompts fits the target's context, so there is no text to judge layers on")
    return texts
