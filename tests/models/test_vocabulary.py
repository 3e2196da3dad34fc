"""Lists of frequent tokens, and heads of only their rows: the same logits, to the last bit where promised."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pilotfish.errors import DraftError, OptionError
from pilotfish.models import vocabulary
from pilotfish.models.base import CausalLM
from pilotfish.models.decoder import Decoder
from pilotfish.models.huggingface import HuggingFaceLM
from pilotfish.models.quantize import quantise
from pilotfish.models.quantized import QuantizedDecoder
from pilotfish.paged.batch import Feed, lay_out
from tests.fakes import ByteTokenizer, TableModel
from tests.models.tiny import VOCAB_SIZE, tiny_model

TEXT = [3, 41, 5, 17, 60, 22, 9]
IDS = [0, 1, 7, 15, 16, 31, 32, 40, 41, 50, 51, 52, 53, 54, 55, 60, 63]  # across tiles of 16, and one more than a tile
SHAPE: dict[str, Any] = {"head_dim": 32, "hidden_size": 64, "intermediate_size": 112, "dtype": torch.float32}
INFO = TableModel(64, eos={63}, name="target").info


def logits_of(lm: CausalLM, num_wanted: int = 3) -> torch.Tensor:
    cache = lm.new_cache(4)
    cache.open("a", [])
    cache.reserve("a", len(TEXT))
    return lm.forward(lay_out([Feed("a", TEXT, 0, num_wanted)], cache), cache).logits_NV


def model(case: str) -> CausalLM:
    implementation, kind, *rest = case.split()
    overrides: dict[str, Any] = {"tie_word_embeddings": True} if "tied" in rest else {}
    if implementation == "hf":
        return HuggingFaceLM(tiny_model(kind, **overrides))
    if implementation == "native":
        return Decoder(tiny_model(kind, **overrides))
    return QuantizedDecoder(quantise(tiny_model(kind, **SHAPE | overrides), int(implementation[3:])), kind)


@pytest.mark.parametrize(
    "case",
    ["hf llama", "hf llama tied", "hf gpt2", "hf cohere", "hf gemma2", "native qwen2", "native gemma3_text tied",
     "int8 llama", "int8 qwen2 tied", "int4 llama"],
)  # fmt: skip
@pytest.mark.parametrize("ids", [IDS, IDS[:1], list(range(VOCAB_SIZE))], ids=["some", "one", "all"])
def test_a_part_of_the_head_gives_that_part_of_the_logits(case: str, ids: list[int]) -> None:
    lm = model(case)
    whole = logits_of(lm)
    part = vocabulary.with_head(lm, ids)
    found = logits_of(part)
    assert found.shape == (3, len(ids)) and part.info.vocab_size == VOCAB_SIZE  # what it reads are all ids still
    if lm.info.bitwise:
        assert torch.equal(found, whole[:, ids])
    else:
        torch.testing.assert_close(found, whole[:, ids], rtol=1e-9, atol=1e-9)
    assert torch.equal(logits_of(lm), whole)  # the model that it was made from is as before
    if len(ids) > 1:
        assert not torch.allclose(found, whole[:, ids[::-1]])


def test_the_work_of_the_other_rows_is_left_out() -> None:
    quantised = model("int8 llama")
    assert isinstance(quantised, QuantizedDecoder)
    part = quantised.with_head(IDS)
    assert part.num_logits == len(IDS) and part._head[0].nbytes == 32 * 64  # two tiles of 16 rows
    assert part._head[0].ctypes.data % 64 == 0
    own = model("hf llama")
    assert isinstance(own, HuggingFaceLM)
    reduced = vocabulary.with_head(own, IDS)
    assert isinstance(reduced, HuggingFaceLM) and reduced.model.lm_head.out_features == len(IDS)
    assert reduced.model.model is own.model.model and own.model.lm_head.out_features == VOCAB_SIZE


def test_of_a_model_without_a_head_to_cut_logits_are_thrown_away() -> None:
    table = TableModel(16, seed=2)
    part = vocabulary.with_head(table, [2, 3, 11])
    cache = part.new_cache(4)
    cache.open("a", [])
    cache.reserve("a", 3)
    logits = part.forward(lay_out([Feed("a", [1, 2, 3], 0, 1)], cache), cache).logits_NV
    assert torch.equal(logits[0], table.logits_of([1, 2, 3])[[2, 3, 11]])


def test_a_list_is_counted_written_and_read_back(tmp_path: Path) -> None:
    found = vocabulary.count([[5, 5, 9], (2, 5, 2)], ByteTokenizer(65), INFO)
    assert found.ids == (5, 2, 9, 63) and found.counts == (3, 2, 1, 1)  # ties by id; the end is counted
    assert found.model == "target"
    expected = torch.zeros(64)
    expected[[9, 7]] = torch.tensor([1.5, 0.25])
    likely = vocabulary.count([[5, 5, 9], (2, 5, 2)], ByteTokenizer(65), INFO, expected=expected)
    assert likely.ids == (5, 9, 2, 63, 7) and likely.counts == (3, 2.5, 2, 1, 0.25)
    path = tmp_path / "list.json"
    found.write(path)
    assert vocabulary.read(path) == found
    with pytest.raises(OptionError, match="cannot be written"):
        found.write(tmp_path / "no" / "list.json")


def test_what_is_counted_comes_first_and_the_lowest_ids_next() -> None:
    listed = vocabulary.Frequencies("", "", (60, 3, 70, 41), (9, 4, 4, 1))
    assert vocabulary.choose(listed, 4, 64) == (0, 3, 41, 60)  # 70 is beyond the table
    assert vocabulary.choose(listed, 2, 64) == (3, 60)
    assert vocabulary.choose(listed, 2, 64, always=[63]) == (60, 63)
    assert vocabulary.choose(None, 3, 64, always=[63]) == (0, 1, 63)
    assert vocabulary.choose(listed, 100, 64) == tuple(range(64))


def test_a_list_for_other_tokens_is_refused(tmp_path: Path) -> None:
    path, mine, other = tmp_path / "list.json", ByteTokenizer(65), ByteTokenizer(65, first_byte=9)
    listed = vocabulary.count([[1]], mine, INFO)
    vocabulary.check(listed, path, mine, INFO)
    vocabulary.check(listed, path, ByteTokenizer(65), TableModel(70).info)  # padded further
    with pytest.raises(DraftError, match="list.json was made for target, whose tokens are not those of table; make"):
        vocabulary.check(listed, path, other, TableModel(64).info)
    with pytest.raises(DraftError):
        vocabulary.check(listed, path, None, INFO)
    without = vocabulary.count([[1]], None, INFO)
    vocabulary.check(without, path, None, INFO)
    with pytest.raises(DraftError):
        vocabulary.check(without, path, None, TableModel(65).info)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "is no list of tokens"),
        ({"pilotfish": "something else"}, "is no list of tokens"),
        ({"ids": [1]}, "equally long"),
        ({"ids": [1, 1]}, "equally long"),
        ({"ids": [1, -2]}, "lists of numbers"),
        ({"ids": [1, True]}, "lists of numbers"),
        ({"counts": [1.5, "x"]}, "lists of numbers"),
        ({"counts": None}, "lists of numbers"),
    ],
)
def test_a_file_that_is_no_list_is_named(tmp_path: Path, change: Any, message: str) -> None:
    path = tmp_path / "list.json"
    fine = {"pilotfish": "draft vocabulary", "tokenizer": "x", "model": "y", "ids": [1, 2], "counts": [4, 3]}
    path.write_text(json.dumps(fine))
    assert vocabulary.read(path).ids == (1, 2)
    path.write_text(change if isinstance(change, str) else json.dumps(fine | change))
    with pytest.raises(OptionError, match=f"list.json.*{message}"):
        vocabulary.read(path)
    with pytest.raises(OptionError, match="cannot be read"):
        vocabulary.read(tmp_path / "nothing")
