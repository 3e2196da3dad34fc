"""Tokens of the three kinds of vocabulary, written so that no two look the same."""

import pytest

from pilotfish.models.words import _BYTES, Spelling
from tests.fakes import ByteTokenizer

LETTERS = {byte: letter for letter, byte in _BYTES.items()}


class Vocabulary(ByteTokenizer):
    """Tokens with these names and bytes; the last is special."""

    def __init__(self, *tokens: tuple[str, bytes]):
        super().__init__(len(tokens) + 1)
        self.raw = [raw for _, raw in tokens]
        names = [name for name, _ in tokens]
        self.__dict__["vocabulary"] = {name: i for i, name in enumerate([*names, "<|end|>"])}
        self.__dict__["spelt"] = frozenset(range(len(tokens)))

    def text(self, ids: list[int]) -> str:
        return b"".join(self.raw[token] for token in ids).decode(errors="replace")


def byte_level(raw: bytes) -> tuple[str, bytes]:
    return "".join(LETTERS[byte] for byte in raw), raw


FISH = "🐟".encode()


@pytest.mark.parametrize(
    ("token", "text", "raw"),
    [
        (byte_level(b" the"), " the", b" the"),
        (byte_level("é".encode()), "é", "é".encode()),
        (byte_level(FISH[:2]), r"bytes:\xf0\x9f", FISH[:2]),
        (byte_level(b" " + FISH[:1]), r"bytes:\x20\xf0", b" " + FISH[:1]),
        (("<0x9F>", b"\x9f"), r"bytes:\x9f", b"\x9f"),
        (("<0x41>", b"A"), "A", b"A"),
        (("\u2581the", b"the"), " the", b" the"),
        (("odd", b"\xff"), "\ufffd", "\ufffd".encode()),
    ],
)
def test_a_token_s_text_and_bytes(token, text, raw):
    spelling = Spelling(Vocabulary(token))
    assert spelling.spell(0) == (text, list(raw))


def test_what_has_no_text_goes_by_its_name():
    spelling = Spelling(Vocabulary(byte_level(b"a")))
    assert spelling.spell(1) == ("<|end|>", list(b"<|end|>"))
    assert spelling.spell(7) == ("token_id:7", list(b"token_id:7"))
    assert Spelling(None).spell(3) == ("token_id:3", [])


def test_the_alphabet_is_a_byte_level_tokenizer_s():
    from tokenizers import pre_tokenizers

    assert set(pre_tokenizers.ByteLevel.alphabet()) == set(_BYTES)
    assert sorted(_BYTES.values()) == list(range(256))
    assert LETTERS[ord(" ")] == "Ġ" and LETTERS[ord("\n")] == "Ċ"
