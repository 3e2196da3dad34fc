"""What the tokens of a tokenizer stand for, as bytes.

Vocabularies write the same text in different ways: " the" is `Ġthe` where bytes are spelt as printable characters and
`▁the` in SentencePiece; a byte is `<0x0A>` there, and a word that goes on begins with `##` in WordPiece. It does not
know models. The one trick: how names are to be read stands in the tokenizer's own decoder, whose steps are looked up,
not guessed; and what was read is then compared with what that decoder makes of a sample.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..errors import ModelError
from .tokenizer import BYTE_TOKEN

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

# Prose, numbers, code: by what share of its tokens two vocabularies have in common, and as a check of what was read.
SAMPLE = """A pilot fish swims ahead of the shark. Why do they travel together, and who leads? In 1998 a study counted
2,417 of them near 36 islands; most (about 70%) stayed with "their" shark for weeks.

def next_move(fish, shark):
    return [step for step in fish.steps if step.distance <= 0.5 * shark.length]

It isn't known whether the larger animal has any benefit, although smaller parasites do disappear.
"""
_SPACE = "▁"


def token_bytes(tokenizer: Tokenizer) -> dict[int, bytes]:
    """Per id that has a text, the bytes it stands for; a part of a character is one to several bytes too.

    The first token of a text may stand for a space more than the text has (see `leads`). Raises ModelError for a
    tokenizer whose names cannot be read.
    """
    hf: Any = tokenizer.hf
    read = _reader(hf, any(name.startswith(_SPACE) for name in tokenizer.vocabulary))
    literal = {token: added.content for token, added in hf.added_tokens_decoder.items()}
    spelt = tokenizer.spelt
    found = {
        token: literal[token].encode() if token in literal else read(name)
        for name, token in tokenizer.vocabulary.items()
        if token in spelt
    }
    ids = [token for token in tokenizer.encode(SAMPLE, add_special_tokens=False) if token in found]
    ours, theirs = b"".join(found[token] for token in ids).decode(errors="replace"), tokenizer.text(ids)
    if "".join(ours.split()) != "".join(theirs.split()):  # some decoders tidy spaces up
        raise _unreadable(hf, "what was read is not what it decodes")
    return found


def leads(tokenizer: Tokenizer) -> bool:
    """Whether the first token of a text stands for a space that is not in the text, as in most of SentencePiece."""
    ids = tokenizer.encode("a", add_special_tokens=False)
    return b"".join(tokenizer.token_bytes.get(token, b"") for token in ids) == b" a"


def _steps(hf: Any) -> list[dict[str, Any]]:
    """The steps of a fast tokenizer's decoder; none if it has no decoder, or is a slow one."""
    backend = getattr(hf, "backend_tokenizer", None)
    if backend is None or backend.decoder is None:
        return []
    decoder = json.loads(backend.decoder.__getstate__())
    steps: list[dict[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return steps


def _reader(hf: Any, spaced: bool) -> Callable[[str], bytes]:
    """From a token's name to its bytes. spaced: whether there are names that begin with SentencePiece's space."""
    steps = _steps(hf)
    by_type = {step["type"]: step for step in steps}
    if "ByteLevel" in by_type:
        return _byte_level()
    if "WordPiece" in by_type:
        prefix = by_type["WordPiece"]["prefix"]
        return lambda name: name.removeprefix(prefix).encode() if name.startswith(prefix) else b" " + name.encode()
    if "BPEDecoder" in by_type:
        suffix = by_type["BPEDecoder"]["suffix"]
        return lambda name: name.replace(suffix, " ").encode()
    replaced = [(s["pattern"].get("String"), s["content"]) for s in steps if s["type"] == "Replace"]
    replaced += [(s["replacement"], " ") for s in steps if s["type"] == "Metaspace"]
    if not steps and spaced:  # a slow SentencePiece tokenizer
        replaced.append((_SPACE, " "))
    if any(pattern is None for pattern, _ in replaced):
        raise _unreadable(hf, "its decoder replaces by a pattern")
    if not steps and not replaced:  # no decoder: words, with spaces between
        return lambda name: b" " + name.encode()
    return _replacing(replaced, has_bytes="ByteFallback" in by_type or not steps)


def _byte_level() -> Callable[[str], bytes]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    characters: dict[int, str] = bytes_to_unicode()  # type: ignore[no-untyped-call]
    byte_of = {character: byte for byte, character in characters.items()}

    def read(name: str) -> bytes:
        try:
            return bytes([byte_of[character] for character in name])
        except KeyError:
            return name.encode()  # a token that was added as it is

    return read


def _replacing(replaced: list[tuple[str, str]], *, has_bytes: bool) -> Callable[[str], bytes]:
    def read(name: str) -> bytes:
        if has_bytes and BYTE_TOKEN.fullmatch(name):
            return bytes([int(name[3:5], 16)])
        for old, new in replaced:
            name = name.replace(old, new)
        return name.encode()

    return read


def _unreadable(hf: Any, why: str) -> ModelError:
    return ModelError(f"what the tokens of {hf.name_or_path or 'this tokenizer'!r} stand for cannot be told: {why}")
