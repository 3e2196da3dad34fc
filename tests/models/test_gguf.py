"""A GGUF file says what the folder says that it stands for, alone and with its tokenizer; broken ones are refused."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFReader
from transformers import AutoTokenizer

from pilotfish import LLM, SamplingParams
from pilotfish.errors import ModelError
from pilotfish.models.load import load
from tests.fakes import oracle
from tests.models.gguf_files import EOS, write_gguf
from tests.models.test_adapters import stock

TEXT = "the ant, then the other: 1, 2, 3 and the ant"
PARAMS = [SamplingParams(temperature=0, max_tokens=12), SamplingParams(seed=3, max_tokens=12)]


def said(model: Any, tokens: list[int]) -> list[tuple[int, ...]]:
    return [oracle(stock(model), tokens, params, eos={EOS}) for params in PARAMS]


@pytest.mark.parametrize(
    ("kind", "weights", "tied"),
    [
        ("llama", Kind.Q8_0, False),
        ("llama", Kind.Q4_0, True),
        ("qwen2", Kind.Q4_1, True),
        ("qwen2", Kind.F16, False),
        ("qwen2", Kind.BF16, False),
    ],
)
def test_a_file_says_what_its_dequantised_folder_says(kind: str, weights: Kind, tied: bool, tmp_path: Path):
    path = tmp_path / "alone.gguf"
    model = write_gguf(path, kind, weights=weights, tied=tied)
    llm = LLM(path, device="cpu", method="ngram", num_speculative_tokens=4)
    assert llm.engine.target.info.eos_ids == {EOS} and llm.engine.target.info.name == str(path)
    assert llm.tokenizer is not None
    tokens = llm.tokenizer.encode(TEXT)
    assert llm.tokenizer.decode(tokens) == TEXT and len(tokens) < len(TEXT), "its merges count"
    right = said(model, tokens)
    assert [one.token_ids for one in llm.generate([TEXT] * 2, PARAMS)] == right
    folder = tmp_path / "folder"
    model.save_pretrained(folder)
    llm.tokenizer.hf.save_pretrained(folder)
    from_folder = LLM(folder, device="cpu")
    assert [one.token_ids for one in from_folder.generate([TEXT] * 2, PARAMS)] == right


def test_a_file_drafts_for_a_file(tmp_path: Path):
    path = tmp_path / "one.gguf"
    model = write_gguf(path, "llama", weights=Kind.Q8_0)
    llm = LLM(path, device="cpu", draft_model=path, num_speculative_tokens=4)
    (done,) = llm.generate([TEXT], PARAMS[:1])
    assert llm.tokenizer is not None and done.token_ids == said(model, llm.tokenizer.encode(TEXT))[0]
    assert done.speculative_decoding["draft_acceptance_rate"] == 1.0


def test_what_lies_beside_a_file_is_not_taken_for_its_own(tmp_path: Path):
    """Another model's settings and tokenizer in the same folder."""
    path = tmp_path / "one.gguf"
    model = write_gguf(path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_layer": 1, "eos_token_id": 7}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 9, "temperature": 3.0}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    (tmp_path / "tokenizer.json").write_text("{}")
    llm = LLM(path, device="cpu")
    assert llm.tokenizer is not None and llm.engine.target.info.eos_ids == {EOS}
    tokens = llm.tokenizer.encode(TEXT)
    assert llm.generate([TEXT], PARAMS[:1])[0].token_ids == said(model, tokens)[0]


def test_loading_draws_no_bars(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    write_gguf(tmp_path / "one.gguf")
    load(tmp_path / "one.gguf", device="cpu")
    assert capfd.readouterr().err == ""


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", [0.02, 0.3, 0.6, 0.999])
def test_a_truncated_file(tmp_path: Path, part: float):
    """In the header, among the tokens, in the weights, at the last of them."""
    path = tmp_path / "cut.gguf"
    write_gguf(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(part * len(whole))])
    with pytest.raises(ModelError, match=r"cut\.gguf.*cannot be loaded|cut\.gguf.*truncated"):
        load(path, device="cpu")


def test_a_tensor_of_an_unknown_type(tmp_path: Path):
    path = tmp_path / "odd.gguf"
    write_gguf(path)
    reader = GGUFReader(path)
    field = reader.tensors[3].field
    data = bytearray(path.read_bytes())
    place = field.offset + sum(int(part.nbytes) for part in field.parts[:-2])  # behind name and shape
    assert struct.unpack_from("<I", data, place)[0] in (Kind.Q8_0, Kind.F32)
    struct.pack_into("<I", data, place, 199)
    path.write_bytes(data)
    with pytest.raises(ModelError, match=r"odd\.gguf.*199"):
        load(path, device="cpu")


def test_an_unknown_architecture(tmp_path: Path):
    import gguf

    path = tmp_path / "new.gguf"
    writer = gguf.GGUFWriter(path, "lama9")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"new\.gguf.*lama9"):
        load(path, device="cpu")


def test_the_tokenizer_is_the_file_s(tmp_path: Path):
    """The same as transformers reads out of it."""
    path = tmp_path / "one.gguf"
    write_gguf(path)
    ours = load(path, device="cpu").tokenizer
    theirs = AutoTokenizer.from_pretrained(str(tmp_path), gguf_file="one.gguf")
    assert ours is not None and ours.encode(TEXT) == theirs.encode(TEXT)
