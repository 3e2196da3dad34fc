"""Which tokens a target says: counted over its own answers, for draft models that propose only the frequent ones.

It does not know drafters. The one trick: at each place not only the token that stands there counts as one, but every
token as much as the target found it likely. A few thousand places say little of a vocabulary by what stands in them,
and more by what might.

What is counted is kept apart from what is measured, if there are prompts enough: a list is not to be judged by the very
texts it was made from.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace

import torch
from torch import Tensor

from ..decoding.sampling import SamplingParams
from ..engine.options import EngineOptions
from ..llm import LLM
from ..models.base import CausalLM
from ..models.load import Loaded
from ..models.vocabulary import Frequencies, count
from ..paged.batch import Feed, lay_out
from .options import TuneOptions
from .prompts import BenchPrompt, read_prompts

_OTHERS = 2  # at most so many times the prompts that are measured
_SEATS = 8
_PAGE = 16
_ROWS = 128  # whose laws are held at once


def prompts_to_count(options: TuneOptions) -> tuple[list[BenchPrompt], bool]:
    """Prompts that are not measured; all, and False, if every one is."""
    every, measured = read_prompts(options.prompts), read_prompts(options.prompts, options.limit)
    others = [prompt for prompt in every if prompt not in measured]
    return (others[: _OTHERS * options.limit], True) if others else (every, False)


def count_own_text(
    target: Loaded, prompts: Sequence[BenchPrompt], options: TuneOptions, engine: EngineOptions
) -> Frequencies:
    """Of these prompts, the likeliest answers, and ``options.own_tokens`` tokens more that are drawn."""
    llm = LLM.from_model(target, **asdict(replace(engine, max_num_seqs=_SEATS, max_num_batched_tokens=2048)))
    context = llm.engine.max_length
    ids = [own for own in (prompt.ids(target.tokenizer) for prompt in prompts) if len(own) < context]
    bounded = SamplingParams(temperature=0, max_tokens=options.max_tokens)
    texts = [[*own, *done.token_ids] for own, done in zip(ids, llm.generate(ids, bounded), strict=True)]
    num_drawn, seed = 0, 0
    while num_drawn < options.own_tokens and ids:
        drawn = llm.generate(ids, replace(bounded, temperature=1.0, seed=seed))
        texts += [list(done.token_ids) for done in drawn]
        num_drawn += sum(len(done.token_ids) for done in drawn)
        seed += 1
    return count(texts, target.tokenizer, target.model.info, expected=_expected(target.model, texts))


def _expected(model: CausalLM, texts: Sequence[Sequence[int]]) -> Tensor:
    """How often each token was to be expected in these texts, float64 [V]: the sum of the laws at all places."""
    total_V = torch.zeros(model.info.vocab_size, dtype=torch.float64)
    for text in texts:
        cache = model.new_cache(-(-len(text) // _PAGE), _PAGE)
        cache.open("text", [])
        cache.reserve("text", len(text))
        for start in range(0, len(text) - 1, _ROWS):
            part = text[start : min(start + _ROWS, len(text) - 1)]
            batch = lay_out([Feed("text", part, start, len(part))], cache, model.info.device)
            logits_NV = model.forward(batch, cache).logits_NV
            total_V += torch.softmax(logits_NV.float(), 1).sum(0, dtype=torch.float64).cpu()
    return total_V
