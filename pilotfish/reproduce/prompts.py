"""Prompts: from a file, or written by the target itself where it is an instruction model.

It does not know what they are for. The one trick: half of them are never measured on; their answers are what count
models are made of.
"""

from collections.abc import Sequence

from ..bench.prompts import read_prompts
from ..decoding.sampling import SamplingParams
from ..errors import PromptError
from ..llm import LLM
from ..models.load import Loaded
from ..train.progress import Progress
from ..train.prompts import Material, Prompt, Prompts, Recipe

_ROUND = 32  # prompts that are written at once
_MOST_ROUNDS = 20
_LONGEST = 512


def prompts_for(target: Loaded, path: str | None, num_wanted: int) -> list[list[int]]:
    """At most so many prompts, as ids; those of a file in its own order, spread over its categories.

    Raises PromptError for a file that cannot be read, or if no prompt is short enough.
    """
    info = target.model.info
    longest = min(_LONGEST, info.context // 2) if info.source_context is None else min(_LONGEST, info.source_context)
    if path is None and target.tokenizer is not None and not info.encoder_decoder:
        return written(target, num_wanted, longest)
    found = [ids for ids in (one.ids(target.tokenizer) for one in read_prompts(path)) if 0 < len(ids) <= longest]
    if len(found) < 2:
        raise PromptError(f"two prompts of at most {longest} tokens are needed at least, and {path} has {len(found)}")
    return found[:num_wanted]


def halves(prompts: Sequence[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
    """Those that are measured on, and the others."""
    return list(prompts[::2]), list(prompts[1::2])


def written(target: Loaded, num_wanted: int, longest: int) -> list[list[int]]:
    """Prompts that the target writes as its own user, always the same ones."""
    assert target.tokenizer is not None
    llm = LLM.from_model(target, max_model_len=min(target.model.info.context, 2 * longest), max_num_seqs=_ROUND)
    recipes = Prompts(target.tokenizer, target.model.info.vocab_size, longest, 0, Material())
    found: dict[tuple[int, ...], None] = {}
    with Progress(f"{target.model.info.name}: prompts", num_wanted) as progress:
        for start in range(0, _MOST_ROUNDS * _ROUND, _ROUND):
            numbers = range(start, start + _ROUND)
            for prompt in _finished(llm, [recipes.recipe(number)[0] for number in numbers], start):
                if prompt is not None and len(prompt.ids) <= longest:
                    found[tuple(prompt.ids)] = None
            progress.show(min(len(found), num_wanted), f"{len(found)} prompts")
            if len(found) >= num_wanted:
                break
    return [list(ids) for ids in found][:num_wanted]


def _finished(llm: LLM, recipes: Sequence[Recipe], seed: int) -> list[Prompt | None]:
    """Drive recipes to their ends, all their questions of one round as one batch."""
    answers: list[str | None] = [None] * len(recipes)
    done: list[Prompt | None] = [None] * len(recipes)
    active = list(range(len(recipes)))
    while active:
        asks = {}
        for i in active:
            try:
                asks[i] = recipes[i].send(answers[i])  # type: ignore[arg-type]  # None begins
            except StopIteration as stop:
                done[i] = stop.value
        active = list(asks)
        params = [
            SamplingParams(temperature=ask.temperature, max_tokens=ask.num_tokens, seed=seed + i)
            for i, ask in asks.items()
        ]
        if asks:
            written = llm.generate([ask.ids for ask in asks.values()], params)
            for i, completion in zip(asks, written, strict=True):
                answers[i] = completion.text
    return done
