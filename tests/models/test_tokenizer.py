"""Tokenizers of both families, built here from a few bytes; the demo model's too where it is installed."""

import random
import time
from collections.abc import Sequence

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pilotfish.errors import ModelError, PromptError
from pilotfish.models import demo, disk_cache
from pilotfish.models.tokenizer import Detokenizer, Tokenizer, mismatch

SENTENCES = ["the pilot fish swims ahead", " of the shark", "naïve café 東京 ", "🐟🦈👩‍👩‍👧", "def f(x):\n    return x"]


def wrapped(backend: tokenizers.Tokenizer, **special: str) -> Tokenizer:
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, **special))


def byte_level(extra: Sequence[str] = ()) -> Tokenizer:
    """GPT-2's kind: every byte is a token, characters may be split over several. Ids 0 and 1 are special."""
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("Ã", "©"), ("ð", "Ł")]
    names = ["<s>", "</s>", *characters, *("".join(pair) for pair in merges), *extra]
    backend = tokenizers.Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return wrapped(backend, bos_token="<s>", eos_token="</s>")


def byte_fallback() -> Tokenizer:
    """Llama-2's kind: ▁ for spaces, one leading space dropped from the text, unknown characters as byte tokens."""
    words = ["▁", "▁the", "▁pilot", "fish", "é", ".", "\n", "\ufffd", "▁▁", "a"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    ids = {name: i for i, name in enumerate(names)}
    backend = tokenizers.Tokenizer(models.BPE(ids, [], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return wrapped(backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def metaspace() -> Tokenizer:
    """T5's kind: a unigram model whose decoder drops the space of the first token only."""
    names = ["<pad>", "</s>", "<unk>", "▁", "▁the", "▁fish", "es", "s", ",", "▁a", "🐟"]
    backend = tokenizers.Tokenizer(models.Unigram([(name, -float(i)) for i, name in enumerate(names)], unk_id=2))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return wrapped(backend, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def word_piece() -> Tokenizer:
    """BERT's kind: pieces that continue a word begin with ##."""
    names = ["[UNK]", "[SEP]", "the", "pilot", "##fish", "##es", ".", "'", "do", "##n"]
    backend = tokenizers.Tokenizer(models.WordPiece({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return wrapped(backend, unk_token="[UNK]", sep_token="[SEP]")


MAKERS = {"byte_level": byte_level, "byte_fallback": byte_fallback, "metaspace": metaspace, "word_piece": word_piece}


@pytest.fixture(params=MAKERS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return MAKERS[request.param]()


@pytest.fixture(scope="module")
def demo_tokenizer() -> Tokenizer:
    """Only from a cache that is already filled: a unit test does not convert 540 MB."""
    transformers = pytest.importorskip("transformers")
    folders = disk_cache.cache_folder().glob(f"*-{demo.GGUF_SHA256[:12]}/tokenizer.json")
    folder = next(folders, None)
    if folder is None:
        pytest.skip("the demo model has not been prepared on this machine")
    return Tokenizer(transformers.AutoTokenizer.from_pretrained(str(folder.parent)))


def pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.feed(token) for token in ids), detokenizer.flush()]


def check_random_ids(tokenizer: Tokenizer, pool: Sequence[int], rounds: int, seed: int = 0) -> None:
    rng = random.Random(seed)
    for _ in range(rounds):
        ids = rng.choices(pool, k=rng.randrange(1, 90))
        expected = tokenizer.hf.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert tokenizer.decode(ids) == expected, ids
        assert "".join(pieces(tokenizer, ids)) == expected, ids


def test_streaming_any_ids_adds_up_to_decoding_them(tokenizer):
    check_random_ids(tokenizer, range(len(tokenizer) + 5), rounds=300)  # special, and five ids that stand for nothing


def test_streaming_broken_bytes_adds_up_to_decoding_them(tokenizer):
    """Mostly bytes above 0x7F, where a window that starts inside a character could go wrong."""
    letters = pre_tokenizers.ByteLevel.alphabet()
    high = [i for name, i in tokenizer.vocabulary.items() if name > "<0x7F>" and name.startswith("<0x")]
    high += [i for name, i in tokenizer.vocabulary.items() if name in letters and ord(name) > 0x7F]
    if not high:
        pytest.skip("a vocabulary without bytes")
    check_random_ids(tokenizer, high, rounds=300)
    check_random_ids(tokenizer, [*high, *range(6)], rounds=300)


def test_streaming_real_text_loses_nothing():
    tokenizer = byte_level()
    text = "".join(SENTENCES * 5)
    assert "".join(pieces(tokenizer, tokenizer.encode(text))) == text


def test_the_demo_tokenizer_streams_any_ids(demo_tokenizer):
    ids = sorted(demo_tokenizer.vocabulary.values())
    ugly = [token for token in ids if "\ufffd" in demo_tokenizer.text([token])]
    assert len(ugly) > 100
    check_random_ids(demo_tokenizer, ids, rounds=100)
    check_random_ids(demo_tokenizer, ugly, rounds=100)


def test_the_demo_tokenizer_streams_cheaply(demo_tokenizer):
    ids = demo_tokenizer.encode("".join(SENTENCES * 40))
    detokenizer = Detokenizer(demo_tokenizer)
    start = time.perf_counter()
    for token in ids:
        detokenizer.feed(token)
    assert (time.perf_counter() - start) / len(ids) < 300e-6  # 6 microseconds when nothing else runs


def test_an_emoji_over_four_tokens_comes_out_whole():
    tokenizer = byte_level()
    ids = tokenizer.encode("🐠!")
    assert len(ids) >= 4
    parts = pieces(tokenizer, ids)
    assert [part for part in parts if part] == ["🐠", "!"]


def test_no_part_shows_a_broken_character_of_valid_text():
    tokenizer = byte_level()
    for text in SENTENCES:
        assert not any("\ufffd" in part for part in pieces(tokenizer, tokenizer.encode(text)))


def test_invalid_bytes_are_not_held_for_ever():
    tokenizer = byte_level()
    detokenizer = Detokenizer(tokenizer)
    bad = tokenizer.vocabulary["\u0122"]  # the byte 0x80, which starts no character
    assert [detokenizer.feed(bad) for _ in range(100)] == ["", *["\ufffd"] * 99]
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_an_unfinished_character_is_flushed_as_decode_shows_it():
    tokenizer = byte_level()
    ids = tokenizer.encode("x🐠")[:-1]
    assert pieces(tokenizer, ids)[-1] == "\ufffd"
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids) == "x\ufffd"


def test_a_run_of_byte_tokens_is_decided_when_it_ends():
    """SentencePiece shows a whole run as broken if one byte of it is: nothing of it is final before."""
    tokenizer = byte_fallback()
    fish = [tokenizer.vocabulary[f"<0x{byte:02X}>"] for byte in "🐟".encode()]
    end = tokenizer.vocabulary["."]
    assert pieces(tokenizer, [*fish, end]) == ["", "", "", "", "🐟.", ""]
    assert pieces(tokenizer, [*fish, fish[0], end])[-2] == "\ufffd" * 5 + "."


def test_the_leading_space_is_dropped_once():
    tokenizer = byte_fallback()
    ids = [tokenizer.vocabulary[name] for name in ("▁the", "▁the", "▁pilot")]
    assert pieces(tokenizer, ids) == ["the", " the", " pilot", ""]


def test_special_tokens_are_silent_and_do_not_disturb_the_space_after_them():
    tokenizer = byte_fallback()
    the, bos = tokenizer.vocabulary["▁the"], tokenizer.vocabulary["<s>"]
    assert pieces(tokenizer, [bos, the, bos, bos, *[bos] * 20, the, 10_000, the])[1] == "the"
    assert "".join(pieces(tokenizer, [bos, the, *[bos] * 20, the, 10_000, the])) == "the the the"


def test_encode_adds_special_tokens_unless_told_otherwise():
    backend = tokenizers.Tokenizer.from_str(byte_level().hf.backend_tokenizer.to_str())
    backend.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = wrapped(backend, bos_token="<s>", eos_token="</s>")
    assert tokenizer.encode("a") == [0, *tokenizer.encode("a", add_special_tokens=False)]


def test_chat_ends_where_the_answer_begins():
    tokenizer = byte_level()
    tokenizer.hf.chat_template = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'cook' %}{{ raise_exception('no cooks') }}{% endif %}"
        "{{ m.role }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    ids = tokenizer.chat([{"role": "user", "content": "the"}])
    assert ids[0] == tokenizer.vocabulary["<s>"]
    assert tokenizer.decode(ids) == "user:the\nassistant:"
    with pytest.raises(PromptError, match="no cooks"):
        tokenizer.chat([{"role": "cook", "content": "the"}])


def test_chat_without_a_template_says_what_to_do():
    with pytest.raises(ModelError, match="no chat template.*plain text"):
        byte_level().chat([{"role": "user", "content": "the"}])


def test_tables_of_different_length_can_be_the_same_tokenizer():
    plain, padded = byte_level(), byte_level(["[PAD0]", "[PAD1]"])
    assert len(padded) == len(plain) + 2
    assert mismatch(plain, padded) is None
    assert mismatch(padded, plain) is None
    added = byte_level()
    added.hf.add_tokens(["<tool>"], special_tokens=True)
    assert mismatch(added, plain) is None


def test_the_lowest_differing_token_is_named():
    plain, other = byte_level(["fish", "shark"]), byte_level(["Fish", "whale"])
    token = plain.vocabulary["fish"]
    assert mismatch(other, plain) == f"token {token} is 'fish' in the target and 'Fish' in the draft"
    assert mismatch(metaspace(), plain) == "token 0 is '<s>' in the target and '<pad>' in the draft"
