"""Two byte-level tokenizers of a handful of tokens, with other ids, other merges and characters split in other places;
their models are tables, so every law is known."""

from collections.abc import Sequence

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from pilotfish.drafters import registry
from pilotfish.models.load import Loaded
from pilotfish.models.tokenizer import Tokenizer
from tests.fakes import TableModel, engine, oracle
from tests.models.test_tokenizer import wrapped

MODES = [
    {"temperature": 0},
    {"seed": 1},
    {},
    {"temperature": 0.7, "top_p": 0.9},
    {"seed": 2, "repetition_penalty": 1.3, "min_tokens": 9},
]


def tokenizer_of(names: Sequence[str], merges: Sequence[str]) -> Tokenizer:
    """Byte-level. A merge is written with a blank between its parts."""
    parts = [tuple(merge.split()) for merge in merges]
    names = [*names, *("".join(pair) for pair in parts)]
    backend = tokenizers.Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, parts))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return wrapped(backend, bos_token="<s>", eos_token="</s>")


TARGET_TOKENS = tokenizer_of(["<s>", "</s>", "a", "b", "Ġ", "Ã", "©"], ["a b", "Ġ a", "Ã ©"])
DRAFT_TOKENS = tokenizer_of(["Ġ", "©", "b", "</s>", "a", "Ã", "<s>"], ["b a", "Ġ a", "Ġ b", "b b"])
TARGET = TableModel(10, order=2, num_phases=3, eos={1}, name="target", sharpness=1.2)
DRAFT = TableModel(11, order=1, num_phases=2, seed=12, eos={3}, name="draft", sharpness=1.2)
OWN = {1: 3, 2: 4, 3: 2, 4: 0, 5: 5, 6: 1, 8: 8}  # the target's ids of what both have, and the draft's
PROMPT = [2, 3, 7, 4, 2]  # abab a


def config(model=DRAFT, tokens=DRAFT_TOKENS, **options):
    return {"method": "draft_model", "model": Loaded(model, tokens), **options}


def drafting(model=DRAFT, tokens=DRAFT_TOKENS, *, target=TARGET, target_tokens=TARGET_TOKENS, k=4, **options):
    own = {key: options.pop(key) for key in ("draft_sample_method", "vocabulary_scheme") if key in options}
    return engine(target, registry.parse(config(model, tokens, **own)).build, k=k, tokenizer=target_tokens, **options)


def expected(prompt, params, target=TARGET):
    return oracle(target.logits_of, prompt, params, eos=target.info.eos_ids)


def watch(found):
    """From now on, what is drafted, with the text it was drafted for."""
    seen = []
    ask = found.drafter.propose

    def propose(requests, limits):
        drafts = ask(requests, limits)
        seen.extend((list(r.tokens), draft) for r, draft in zip(requests, drafts, strict=True))
        return drafts

    found.drafter.propose = propose
    return seen


def read(text: Sequence[int]) -> list[int] | None:
    """The text in the draft's tokens, by itself; None if it ends inside a character."""
    data = b"".join(TARGET_TOKENS.token_bytes[token] for token in text)
    if data.endswith(b"\xc3"):
        return None
    return DRAFT_TOKENS.encode(data.decode(errors="replace"), add_special_tokens=False)
