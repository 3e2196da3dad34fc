"""Which target a head was trained for: sizes, and a checksum of the vocabulary.

It does not know heads. The one trick: nothing of it depends on how the target's weights are kept, so a head trained on
an int8 target serves the float one and the other way round. Two models of the same shape and vocabulary (a base model
and its instruct version) are not told apart: with the other's head a model drafts worse, and says the same.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from ..errors import DraftError
from ..models.load import Loaded

_WORDS = {
    "hidden_size": "a hidden size of {}",
    "vocab_size": "a vocabulary of {}",
    "num_layers": "{} layers",
    "vocabulary": "a vocabulary with checksum {}",
}


def fingerprint(target: Loaded) -> dict[str, Any]:
    """vocabulary: sha256 of the tokenizer's tokens and ids; None without a tokenizer, which fits any."""
    info = target.model.info
    vocabulary = None
    if target.tokenizer is not None:
        tokens = json.dumps(sorted(target.tokenizer.vocabulary.items()), ensure_ascii=False)
        vocabulary = hashlib.sha256(tokens.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return {
        "name": info.name,
        "hidden_size": info.hidden_size,
        "vocab_size": info.vocab_size,
        "num_layers": len(info.layers),
        "vocabulary": vocabulary,
    }


def check(trained_for: Mapping[str, Any], target: Loaded, head: str) -> None:
    """Raises DraftError, naming both models, if the target is another. What either does not tell is not compared."""
    here = fingerprint(target)
    for key, words in _WORDS.items():
        theirs, ours = trained_for.get(key), here[key]
        if theirs is not None and ours is not None and theirs != ours:
            raise DraftError(
                f"the head in {head} was trained for {trained_for.get('name') or 'another model'}, with "
                f"{words.format(theirs)}; the target {here['name']} has {words.format(ours)}: train one for it"
            )
