"""What tokens stand for, read off the names of every family of tokenizers."""

from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from pilotfish.errors import ModelError
from pilotfish.models.spelling import SAMPLE
from pilotfish.models.tokenizer import Tokenizer
from tests.models.test_tokenizer import SENTENCES, byte_fallback, byte_level, metaspace, word_piece, wrapped


def words(decoder: Any = None) -> Tokenizer:
    """Whole words, with spaces between."""
    backend = tokenizers.Tokenizer(models.WordLevel({"<unk>": 0, "the": 1, "fish": 2, ".": 3}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if decoder is not None:
        backend.decoder = decoder
    return wrapped(backend, unk_token="<unk>")


@pytest.mark.parametrize("text", SENTENCES)
@pytest.mark.parametrize(("make", "leads"), [(byte_level, False), (byte_fallback, True)])
def test_the_bytes_of_a_text_s_tokens_are_the_text_s(make, leads, text):
    tokenizer = make()
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert len(tokens) > 5 and tokenizer.leads == leads
    assert b"".join(tokenizer.token_bytes[token] for token in tokens) == b" " * leads + text.encode()


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (byte_level, {"Ġthe": b" the", "Ã": b"\xc3", "Ã©": "é".encode(), "ðŁ": b"\xf0\x9f", "<s>": None, "</s>": None}),
        (byte_fallback, {"▁pilot": b" pilot", "fish": b"fish", "<0x0A>": b"\n", "<0xE2>": b"\xe2", "<unk>": None}),
        (metaspace, {"▁the": b" the", "es": b"es", "🐟": "🐟".encode(), "<pad>": None}),
        (word_piece, {"pilot": b" pilot", "##fish": b"fish", "[UNK]": None}),
        (words, {"the": b" the", "<unk>": None}),
    ],
)
def test_names_are_read_as_their_decoder_reads_them(make, expected):
    tokenizer = make()
    found = {name: tokenizer.token_bytes.get(tokenizer.vocabulary[name]) for name in expected}
    assert found == expected


def test_added_tokens_stand_for_what_they_say_unless_they_are_special():
    tokenizer = byte_level()
    tokenizer.hf.add_tokens(["<tool é>"])
    tokenizer.hf.add_tokens(["<end>"], special_tokens=True)
    assert tokenizer.token_bytes[tokenizer.vocabulary["<tool é>"]] == "<tool é>".encode()
    assert tokenizer.vocabulary["<end>"] not in tokenizer.token_bytes


def test_names_that_cannot_be_read_are_refused():
    with pytest.raises(ModelError, match="stand for cannot be told: its decoder replaces by a pattern"):
        _ = words(decoders.Replace(tokenizers.Regex("x+"), " ")).token_bytes


def test_what_was_read_is_compared_with_what_is_decoded():
    tokenizer = words()
    tokenizer.text = lambda ids: "something else"
    assert tokenizer.encode(SAMPLE, add_special_tokens=False)
    with pytest.raises(ModelError, match="what was read is not what it decodes"):
        _ = tokenizer.token_bytes
