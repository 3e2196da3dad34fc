"""How a single token is written in log-probabilities and traces: its text, and its bytes.

It does not know models or requests. The one trick: a token that is no whole character has no text of its own, so it is
written by its bytes, as OpenAI does (``bytes:\\xe2\\x80``); else different tokens would look the same.
"""

import functools

from .tokenizer import BYTE_TOKEN, REPLACEMENT, Tokenizer

_SPACE = "\u2581"  # SentencePiece's; a decoder drops it at the beginning of a text


def _byte_alphabet() -> dict[str, int]:
    """The characters that byte-level vocabularies (GPT-2's and its heirs') write bytes with."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(rest)}


_BYTES = _byte_alphabet()


class Spelling:
    """tokenizer: None where there is none; tokens are then written by their numbers."""

    def __init__(self, tokenizer: Tokenizer | None):
        self.tokenizer = tokenizer

    @functools.cached_property
    def _names(self) -> dict[int, str]:
        assert self.tokenizer is not None
        return {token: name for name, token in self.tokenizer.vocabulary.items()}

    def spell(self, token: int) -> tuple[str, list[int]]:
        """(text, bytes) of one token. One without a text (end of text, padding) goes by its name."""
        if self.tokenizer is None:
            return f"token_id:{token}", []
        name = self._names.get(token, f"token_id:{token}")
        if token not in self.tokenizer.spelt:
            return name, list(name.encode())
        text = self.tokenizer.text([token])
        if name.startswith(_SPACE) and not text.startswith(" "):
            text = f" {text}"
        if REPLACEMENT not in text:
            return text, list(text.encode())
        if BYTE_TOKEN.fullmatch(name):
            raw = bytes([int(name[3:5], 16)])
        else:
            raw = bytes(_BYTES[letter] for letter in name if letter in _BYTES)
        if raw.decode(errors="replace") != text:  # a vocabulary of another kind
            return text, list(text.encode())
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), list(raw)
