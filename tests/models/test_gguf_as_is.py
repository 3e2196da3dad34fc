"""A GGUF file used as it is: the same weights, tokenizer and texts, said and kept once; broken files are refused."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import filelock
import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from transformers import AutoTokenizer

from pilotfish import LLM, SamplingParams
from pilotfish.drafters.draft_model import DraftModelOptions
from pilotfish.engine.options import EngineOptions
from pilotfish.errors import ModelError, OptionError
from pilotfish.inspection import inspect
from pilotfish.models import gguf as as_is
from pilotfish.models.architecture import describe, fused, weights
from pilotfish.models.decoder import Decoder
from pilotfish.models.gguf_file import UNREAD, GgufFile, differing_setting, unread_setting
from pilotfish.models.linear import Packed, unpack
from pilotfish.models.load import load
from pilotfish.models.options import LoadOptions, bits_of, name_of
from pilotfish.models.products import GROUPED
from pilotfish.models.quantized import QuantizedDecoder
from pilotfish.models.vocabulary import with_head
from pilotfish.paged.batch import Feed, lay_out
from tests.models.gguf_files import EOS, write_gguf

TEXT = "the ant, then the other: 1, 2, 3 and the ant"
WIDE = {"hidden_size": 128, "head_dim": 32}
WIDER = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 256}  # K types come in blocks of 256
AS_IS: dict[str, Any] = {"quantization": "gguf", "kernels": "numba"}  # C++ would be compiled into each test's own cache


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PILOTFISH_CACHE", str(tmp_path / "cache"))
    return tmp_path


# -- whole files -----------------------------------------------------------------------------------------------------


def matrices(lm: QuantizedDecoder) -> dict[str, torch.Tensor]:
    """Each matrix as its bytes say."""
    facts, origin, arrays = lm.architecture, lm.quantised.origin, lm.quantised.arrays
    heads, inner, hidden = facts.num_heads * facts.head_dim, facts.intermediate_size, facts.hidden_size
    shapes = {"embedding": (hidden, facts.vocab_size), "head": (hidden, facts.vocab_size),
              "qkv": (hidden, facts.num_projected), "o": (heads, hidden), "gate_up": (hidden, 2 * inner),
              "down": (inner, hidden)}  # fmt: skip
    found = {}
    for name in origin.matrix_bits:
        parts = (arrays[f"{name}.{part}"] for part in ("weights", "scales", "bias"))
        found[name] = unpack(Packed(origin.bits_of(name), *shapes[name.rpartition(".")[2]], *parts))
    return found


def logits(lm: Any, tokens: list[int]) -> torch.Tensor:
    cache = lm.new_cache(8)
    cache.open("a", tokens)
    assert cache.reserve("a", len(tokens))
    return lm.forward(lay_out([Feed("a", tokens, 0, len(tokens))], cache), cache).logits_NV


def mixed(name: str) -> Kind:
    """As llama.cpp mixes types: values and what leads back in more bits."""
    if "attn_v" in name or "ffn_down" in name:
        return Kind.Q6_K
    return Kind.Q8_0 if "token_embd" in name else Kind.Q4_K


@pytest.mark.parametrize(
    ("family", "kind", "tied", "shape", "error"),
    [
        ("llama", Kind.Q4_0, False, WIDE, 0),
        ("llama", Kind.Q8_0, True, WIDE, 0),
        ("qwen2", Kind.Q5_0, False, WIDE, 0),
        ("qwen3", Kind.Q4_1, True, {"hidden_size": 128, "head_dim": 64}, 0.01),  # the embedding becomes 8 bits
        ("qwen2", mixed, False, WIDER, 0.01),
        ("llama", Kind.BF16, False, WIDE, 0.01),
    ],
)
def test_a_model_has_the_file_s_weights(
    family: str, kind: Any, tied: bool, shape: dict[str, Any], error: float, tmp_path: Path
):
    path = tmp_path / "one.gguf"
    model = write_gguf(path, family, weights=kind, tied=tied, shape=shape)
    loaded = load(path, **AS_IS)
    lm = loaded.model
    assert isinstance(lm, QuantizedDecoder) and lm.info.bitwise and lm.info.eos_ids == {EOS}
    assert lm.info.quantization == "gguf" and lm.info.name == str(path)
    facts = describe(model)
    rounded = replace(facts, norm_epsilon=float(np.float32(facts.norm_epsilon)))  # as the file has it
    assert lm.architecture == rounded and facts.tied == tied
    found = matrices(lm)
    for name, parts in weights(model, facts):
        if name in found:
            off = float((found[name] - fused(parts)).norm() / fused(parts).norm())
            assert off == 0 if not error else off < error, name
        elif name.endswith(".bias"):
            bias = lm.quantised.arrays[name]
            assert torch.equal(torch.from_numpy(np.array(bias))[: len(fused(parts))], fused(parts)), name
        else:
            assert torch.equal(torch.from_numpy(np.array(lm.quantised.arrays[name])), fused(parts).float()), name
    assert len(found) == 4 * facts.num_layers + (1 if tied else 2)
    tokens = [3, 41, 5, 17, 60, 22, 9, 200, 259]
    wanted, ours = logits(Decoder(model), tokens), logits(lm, tokens)
    assert float((ours - wanted).norm() / wanted.norm()) < 0.2
    theirs = AutoTokenizer.from_pretrained(str(tmp_path), gguf_file="one.gguf")
    assert loaded.tokenizer is not None and loaded.tokenizer.encode(TEXT) == theirs.encode(TEXT)
    assert loaded.tokenizer.hf.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()


def test_rows_of_queries_and_keys_are_moved_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The negative control: left where llama.cpp has them, they are others."""
    path = tmp_path / "one.gguf"
    model = write_gguf(path, weights=Kind.Q8_0, shape=WIDE)
    monkeypatch.setattr(as_is._FileModel, "_order", lambda self, tensor: None)
    found = matrices(load(path, **AS_IS).model)  # type: ignore[arg-type]
    rows = dict(weights(model, describe(model)))
    assert not torch.equal(found["0.qkv"], fused(rows["0.qkv"]))
    assert torch.equal(found["0.o"], fused(rows["0.o"]))


def test_parts_of_different_types_become_one(tmp_path: Path):
    def kinds(name: str) -> Kind:
        return {"attn_v": Kind.Q8_0, "ffn_gate": Kind.Q4_1}.get(name.split(".")[-2], Kind.Q4_0)

    path = tmp_path / "one.gguf"
    model = write_gguf(path, weights=kinds, shape=WIDE)
    lm = load(path, **AS_IS).model
    assert isinstance(lm, QuantizedDecoder)
    bits = lm.quantised.origin.matrix_bits
    assert (bits["0.qkv"], bits["0.gate_up"], bits["head"]) == (GROUPED, 4, GROUPED)
    found = matrices(lm)
    for name, parts in weights(model, describe(model)):
        if name in found:
            assert torch.equal(found[name], fused(parts)), name


def test_what_was_converted_is_said_once_and_kept(tmp_path: Path, capfd: pytest.CaptureFixture[str], folder: Path):
    path = tmp_path / "one.gguf"
    write_gguf(path, "qwen2", weights=mixed, shape=WIDER)
    first = load(path, **AS_IS).model
    said = capfd.readouterr().err
    assert said.count("\n") == 2 and "Repacking" in said and "Q8_0 to 8 bits (exact)" in said
    assert "Q4_K to 4 bits (0.0" in said and "Q6_K to 8 bits (0." in said and "Q4_K to 8 bits (0." in said
    again = load(path, **AS_IS).model
    assert capfd.readouterr().err == ""
    assert isinstance(first, QuantizedDecoder) and isinstance(again, QuantizedDecoder)
    assert again.quantised.origin == first.quantised.origin and again.quantised.remark == first.quantised.remark
    (index,) = (folder / "cache").glob("*/index.json")
    assert json.loads(index.read_text())["remark"] in said


def test_another_file_under_the_same_name_is_read_anew(tmp_path: Path):
    path = tmp_path / "one.gguf"
    write_gguf(path, weights=Kind.Q8_0, shape=WIDE)
    first = matrices(load(path, **AS_IS).model)  # type: ignore[arg-type]
    write_gguf(path, weights=Kind.Q4_0, shape=WIDE)
    assert not torch.equal(first["0.o"], matrices(load(path, **AS_IS).model)["0.o"])  # type: ignore[arg-type]
    assert len(list((tmp_path / "cache").glob("*/index.json"))) == 1


def test_a_tokenizer_that_would_come_back_as_another_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from pilotfish.models import load as loading

    path = tmp_path / "one.gguf"
    write_gguf(path, shape=WIDE)
    monkeypatch.setattr(loading, "_facts_of", lambda tokenizer: object())
    tokenizer = load(path, **AS_IS).tokenizer
    assert tokenizer is not None and tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert not list((tmp_path / "cache").glob("*/tokenizer"))


def test_frequencies_are_divided_by_the_file_s_factors(tmp_path: Path):
    factors = np.linspace(1, 8, 16, dtype=np.float32)
    plain, scaled = tmp_path / "plain.gguf", tmp_path / "scaled.gguf"
    write_gguf(plain, shape=WIDE)
    write_gguf(scaled, shape=WIDE, more={"rope_freqs.weight": factors})
    one, other = (load(path, **AS_IS).model for path in (plain, scaled))
    assert isinstance(one, QuantizedDecoder) and isinstance(other, QuantizedDecoder)
    name = "frequencies.0"
    assert np.allclose(one.quantised.arrays[name] / factors, other.quantised.arrays[name], rtol=1e-6)


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_rotations_that_transformers_would_not_read_are_refused(quantization: Any, tmp_path: Path):
    """It would make another model of the file, without a word."""
    plain, factors, scaled = (tmp_path / f"{name}.gguf" for name in ("plain", "factors", "scaled"))
    write_gguf(plain, shape=WIDE)
    write_gguf(factors, shape=WIDE, more={"rope_freqs.weight": np.linspace(1, 8, 16, dtype=np.float32)})
    write_gguf(scaled, "qwen2", shape=WIDE, texts={"qwen2.rope.scaling.type": "yarn"})
    assert load(plain).model.info.vocab_size
    with pytest.raises(ModelError, match=r"does not read rope_freqs\.weight.*--quantization gguf does"):
        load(factors, quantization=quantization, kernels="numba")
    with pytest.raises(ModelError, match="rotations are scaled .*'yarn'.*own folder"):
        load(scaled, quantization=quantization, kernels="numba")


@pytest.mark.parametrize(
    "settings",
    [
        {"rope.scaling.factor": 4.0},  # of no named type: llama.cpp takes it for linear
        {"rope.scale_linear": 4.0},
        {"rope.scaling.attn_factor": 2.0},
        {"rope.dimension_count": 16},
    ],
)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_other_rotations_are_refused_as_it_is_and_dequantised(family: str, settings: dict[str, Any], tmp_path: Path):
    path = tmp_path / "odd.gguf"
    write_gguf(path, family, shape=WIDE, numbers=settings)
    for quantization in ("gguf", "none"):
        with pytest.raises(
            ModelError, match=r"rotations are scaled|only 16 are rotated|the file's settings|mismatched"
        ):
            load(path, quantization=quantization)  # type: ignore[arg-type]


def test_rotations_scaled_by_nothing_are_not_refused(tmp_path: Path):
    """As llama.cpp reads them: type 'none' is never scaled, and a factor of 0 or 1 is none."""
    path = tmp_path / "one.gguf"
    for numbers, texts in (({"rope.scaling.factor": 1.0}, {}), ({"rope.scaling.factor": 4.0}, {"type": "none"})):
        write_gguf(path, shape=WIDE, numbers=numbers, texts={f"llama.rope.scaling.{k}": v for k, v in texts.items()})
        assert load(path, **AS_IS).model.info.vocab_size == 260


@pytest.mark.parametrize("setting", UNREAD)
@pytest.mark.parametrize("quantization", ["gguf", "none"])
def test_settings_that_nobody_reads_are_refused(quantization: Any, setting: str, tmp_path: Path):
    path = tmp_path / "odd.gguf"
    odd = {bool: int(not UNREAD[setting][0]), int: 7, float: 0.5}[type(UNREAD[setting][0])]
    write_gguf(path, shape=WIDE, numbers={setting: odd})
    with pytest.raises(ModelError, match=rf"setting llama\.{setting} is {odd}, which is not read.*own folder"):
        load(path, quantization=quantization, kernels="numba")


@pytest.mark.parametrize("quantization", ["gguf", "none"])
def test_settings_that_are_as_usual_are_not(quantization: Any, tmp_path: Path):
    """Nor is a window that is wider than the longest text."""
    path = tmp_path / "one.gguf"
    for last in (0, -1):
        numbers = {name: usual[last] for name, usual in UNREAD.items()} | {"attention.sliding_window": 1 << 20}
        write_gguf(path, shape=WIDE, numbers=numbers)
        assert load(path, quantization=quantization, kernels="numba").model.info.vocab_size == 260


def test_lists_of_settings_and_those_of_other_architectures():
    def unread(name: str, value: Any, config: Any = None) -> str | None:
        settings = {"general.architecture": name.split(".")[0], "gemma2.context_length": 8192, name: value}
        file = GgufFile(Path("x"), settings, {}, {})
        return unread_setting(file) if config is None else differing_setting(file, config)

    assert unread("qwen2.rope.dimension_sections", [0, 0, 0, 0]) is None
    assert "[8, 12, 12, 0], which is not read" in (unread("qwen2.rope.dimension_sections", [8, 12, 12, 0]) or "")
    gemma, phi = transformers.Gemma2Config(), transformers.Phi3Config()
    assert unread("gemma2.attn_logit_softcapping", 50.0, gemma) is None
    assert unread("gemma2.attention.sliding_window", 4096, gemma) is None  # which is read
    assert "40.0, which is not read (its model has 50.0)" in str(unread("gemma2.attn_logit_softcapping", 40.0, gemma))
    assert "is 2047, which is not read (its model has None)" in str(unread("phi3.attention.sliding_window", 2047, phi))
    assert unread("phi3.attention.clamp_kqv", 8.0, phi) is None  # by what name its model would have that is not known


def test_every_setting_that_the_format_knows_was_thought_about():
    """One that a new version of the `gguf` package brings must be put into `UNREAD`, or here."""
    read = {
        "vocab_size", "context_length", "embedding_length", "block_count", "feed_forward_length",
        "attention.head_count", "attention.head_count_kv", "attention.layer_norm_rms_epsilon",
        "attention.key_length", "attention.value_length", "rope.dimension_count", "rope.freq_base",
        "rope.scaling.type", "rope.scaling.factor", "rope.scaling.attn_factor",
    }  # fmt: skip
    # Experts, recurrences, low ranks and several streams come with tensors of their own, which are refused.
    with_tensors = (
        "expert", "moe_", "leading_dense", "interleave_moe", "attention.indexer", "lora_rank", "_mla",
        "altup.", "per_layer_input", "time_", "token_shift", "rescale_every", "group_norm", "relative_buckets",
        "features_length", "dense}", "deepstack", "full_attention", "shared_kv", "embedding_length_out",
    )  # fmt: skip
    # What means nothing without a setting that is refused, or nothing to a decoder of one of our families.
    without_meaning = (
        "_swa", "sliding_window_pattern", "rope.scaling.", "pooling_type", "decoder_", "tensor_data_layout",
        "use_parallel_residual", "layer_norm_epsilon",
    )  # fmt: skip
    known: set[str] = set()
    for group in (gguf.Keys.LLM, gguf.Keys.Attention, gguf.Keys.Attention.Indexer, gguf.Keys.Rope):
        known |= {name.removeprefix("{arch}.") for key, name in vars(group).items() if isinstance(name, str)
                  and name.startswith("{arch}.")}  # fmt: skip
    assert len(known) > 60 and not set(UNREAD) & read
    excused = {name for name in known for part in (*with_tensors, *without_meaning) if part in name}
    assert known - read - excused - set(UNREAD) == set()
    assert set(UNREAD) <= known


@pytest.mark.parametrize("name", ["blk.1.attn_q.bias", "blk.0.attn_sinks.weight", "rope_factors_long.weight"])
def test_tensors_that_transformers_would_not_read_are_refused(name: str, tmp_path: Path):
    """Biases of a Llama, for example: it would make a model without them, and say nothing."""
    path = tmp_path / "odd.gguf"
    write_gguf(path, shape=WIDE, more={name: np.ones(128, np.float32)})
    for quantization, words in (("none", "does not read 1 of its tensors"), ("gguf", "no use for")):
        with pytest.raises(ModelError, match=rf"{words}, {re.escape(name)} for one; use the model's own folder"):
            load(path, quantization=quantization)  # type: ignore[arg-type]


def test_what_a_class_has_by_default_is_not_the_file_s(tmp_path: Path):
    """A window of 4096 for every file called mistral; token 2 as the end for every Llama."""
    path = tmp_path / "one.gguf"
    write_gguf(path, shape=WIDE, texts={"general.name": "mistral"}, eos=None)
    lm = load(path, **AS_IS).model
    assert isinstance(lm, QuantizedDecoder)
    assert lm.architecture.family == "mistral" and set(lm.architecture.windows) == {None}
    assert lm.info.eos_ids == frozenset()


def test_a_copy_with_the_time_of_another_is_read_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The same name from two folders, as in archives that set all times to one."""
    found = []
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        write_gguf(folder / "one.gguf", shape=WIDE, seed=number)
        os.utime(folder / "one.gguf", ns=(10**9, 10**9))
        monkeypatch.chdir(folder)
        found.append(matrices(load("one.gguf", **AS_IS).model)["0.o"])  # type: ignore[arg-type]
    assert (tmp_path / "0/one.gguf").stat().st_size == (tmp_path / "1/one.gguf").stat().st_size
    assert not torch.equal(*found)


def test_what_a_killed_process_left_is_deleted_with_the_next_file(tmp_path: Path, folder: Path):
    path = tmp_path / "one.gguf"
    write_gguf(path, shape=WIDE)
    load(path, **AS_IS)
    (kept,) = (path for path in (folder / "cache").iterdir() if path.is_dir())
    begun, busy = (kept.with_name(kept.name[:-12] + key + ".partial") for key in ("0" * 12, "1" * 12))
    for left in (begun, busy):
        left.mkdir()
        (left / "weights.bin").write_bytes(b"half")
    with filelock.FileLock(busy.with_name(busy.name.removesuffix(".partial") + ".lock")):
        load(path, **AS_IS)
        assert not begun.exists() and busy.exists(), "somebody is at work there"
    load(path, **AS_IS)
    assert not busy.exists() and kept.exists()


def test_ends_and_smaller_heads_read_the_same_numbers(tmp_path: Path):
    path = tmp_path / "one.gguf"
    model = write_gguf(path, weights=Kind.Q5_0, shape=WIDE)
    lm = load(path, **AS_IS).model
    assert isinstance(lm, QuantizedDecoder)
    ids = torch.tensor([0, 5, 17, 259])
    assert torch.equal(lm.ends().embed(ids), model.get_input_embeddings().weight[ids])
    assert torch.equal(lm.ends().head_rows(ids), model.lm_head.weight[ids])
    tokens = [3, 41, 5, 17, 60]
    assert torch.equal(logits(with_head(lm, ids.tolist()), tokens), logits(lm, tokens)[:, ids])


def test_a_file_drafts_for_a_file(tmp_path: Path):
    path = tmp_path / "one.gguf"
    write_gguf(path, "qwen2", weights=mixed, shape=WIDER)
    params = SamplingParams(temperature=0, max_tokens=12)
    plain = LLM(path, **AS_IS).generate([TEXT], params)
    llm = LLM(path, **AS_IS, draft_model=path, num_speculative_tokens=4)
    (done,) = llm.generate([TEXT], params)
    assert done.token_ids == plain[0].token_ids
    assert done.speculative_decoding["draft_acceptance_rate"] == 1.0
    assert llm.engine.drafter.model.info.quantization == "gguf"  # type: ignore[attr-defined]


def test_how_a_draft_beside_a_file_is_loaded():
    target = type("Info", (), {"quantization": "gguf"})()
    loading = {model: DraftModelOptions(model=model).loading(target) for model in ("a.gguf", "folder", "demo")}
    assert loading == {"a.gguf": "gguf", "folder": "int8", "demo": "int8"}
    assert DraftModelOptions(model="a.gguf", quantization="gguf").loading(target) == "gguf"


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", [0.0001, 0.02, 0.3, 0.6, 0.999])
def test_a_truncated_file(tmp_path: Path, part: float):
    path = tmp_path / "cut.gguf"
    write_gguf(path, shape=WIDE)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(part * len(whole))])
    with pytest.raises(ModelError, match=r"cut\.gguf is truncated: .* ends at byte"):
        load(path, **AS_IS)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (
            {"change": lambda name, raw: None if name == "blk.1.ffn_up.weight" else raw},
            "blk.1.ffn_up.weight is missing",
        ),
        ({"change": lambda name, raw: None if name == "blk.2.attn_k.bias" else raw}, "blk.2.attn_k.bias is missing"),
        (
            {"change": lambda name, raw: raw[:80] if name == "blk.1.ffn_up.weight" else raw},
            r"blk.1.ffn_up.weight has the shape \[80, 128\], and by the file's settings \[96, 128\]",
        ),
        ({"more": {"blk.0.attn_sinks.weight": np.ones(4, np.float32)}}, "no use for, blk.0.attn_sinks.weight"),
        ({"texts": {"qwen2.rope.scaling.type": "yarn"}}, "rotations are scaled .*'yarn'"),
        ({"numbers": {"block_count": 1 << 24}}, f"the tensor blk.{(1 << 24) - 1}.attn_norm.weight is missing"),
        ({"numbers": {"context_length": 0}}, "setting qwen2.context_length must be a whole number from 1, not 0"),
        ({"texts": {"qwen2.attention.head_count": "many"}}, "qwen2.attention.head_count must be .* not 'many'"),
        (
            {"texts": {"qwen2.attention.layer_norm_rms_epsilon": "x"}},
            "layer_norm_rms_epsilon must be a number, not 'x'",
        ),
        ({"shape": {"hidden_size": 64, "head_dim": 16}}, "heads of 16, which is not a multiple of 32"),
    ],
)
def test_a_file_that_is_no_model_of_its_architecture(broken: dict[str, Any], message: str, tmp_path: Path):
    path = tmp_path / "odd.gguf"
    write_gguf(path, "qwen2", **{"shape": WIDE} | broken)
    with pytest.raises(ModelError, match=rf"odd\.gguf' cannot be used as it is: .*{message}"):
        load(path, **AS_IS)


@pytest.mark.parametrize("name", ["blk.1.ffn_down.weight", "blk.0.attn_q.bias", "blk.2.ffn_norm.weight"])
def test_broken_numbers_are_named(name: str, tmp_path: Path):
    def change(own: str, raw: np.ndarray) -> np.ndarray:
        raw = raw.copy()
        if own == name:
            raw.reshape(-1).view(np.uint8)[:4] = 0xFF  # a NaN, be it float16 or float32
        return raw

    path = tmp_path / "nan.gguf"
    write_gguf(path, "qwen2", shape=WIDE, change=change)
    with pytest.raises(ModelError, match=rf"{name}.* holds a NaN"):
        load(path, **AS_IS)
    assert not list((tmp_path / "cache").glob("*gguf-*/")), "nothing half-made is left"


def test_other_files_are_refused_with_the_way_out(tmp_path: Path):
    path = tmp_path / "new.gguf"
    writer = gguf.GGUFWriter(path, "lama9")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(
        ModelError, match=r"new\.gguf.*'lama9' is not one of llama, qwen2, qwen3; use quantization 'none'"
    ):
        load(path, **AS_IS)
    write_gguf(path, shape=WIDE, texts={"split.count": "two"})
    with pytest.raises(ModelError, match="is one of two parts"):
        load(path, **AS_IS)
    path.write_bytes(b"PK" + bytes(100))
    with pytest.raises(ModelError, match="is not a GGUF file"):
        load(path, **AS_IS)


def test_a_type_that_is_not_known(tmp_path: Path):
    path = tmp_path / "odd.gguf"
    write_gguf(path, shape=WIDE)
    name = b"blk.1.ffn_up.weight"
    data = bytearray(path.read_bytes())
    place = data.index(name) + len(name) + 4 + 2 * 8  # behind the number of dimensions and two of them
    assert data[place] == Kind.Q8_0
    data[place] = 199
    path.write_bytes(data)
    with pytest.raises(ModelError, match=r"odd\.gguf.*blk\.1\.ffn_up\.weight is of type 199"):
        load(path, **AS_IS)
    data[place] = Kind.Q8_1  # of a known length, but in no file
    path.write_bytes(data + bytes(10000))
    with pytest.raises(ModelError, match=r"odd\.gguf.*blk\.1\.ffn_up\.weight is of type Q8_1"):
        load(path, **AS_IS)


def test_a_head_of_garbage_is_told_in_one_line(tmp_path: Path):
    path = tmp_path / "odd.gguf"
    write_gguf(path, shape=WIDE)
    whole, name = path.read_bytes(), b"blk.1.ffn_up.weight"
    for garbage in (b"blk.1\nffn_up.weight", b"\xff" * len(name), name.replace(b"1", b"9")):
        path.write_bytes(whole.replace(name, garbage))
        with pytest.raises(ModelError) as caught:
            load(path, **AS_IS)
        assert "\n" not in str(caught.value) and "odd.gguf" in str(caught.value)


def test_it_is_for_files_alone(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    for name in (tmp_path, "demo", "some/model"):
        with pytest.raises(ModelError, match=r"a \.gguf file as they are.*use 'int8' or 'int4'"):
            load(name, **AS_IS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"adapter": "folder"}, "quantization 'gguf' has none: use int8 or int4"),
        ({"adapters": {"law": "folder"}}, "quantization is 'gguf'"),
        ({"device": "cuda"}, "is for the CPU"),
        ({"model_impl": "hf"}, "needs our own decoder"),
        ({"dtype": "bfloat16"}, "the rest is float32"),
    ],
)
def test_options_that_contradict_it(options: dict[str, Any], message: str):
    with pytest.raises(OptionError, match=message):
        LoadOptions(quantization="gguf", **options)


def test_names_of_bits():
    assert bits_of("gguf") == GROUPED and [name_of(bits) for bits in (0, 8, 4, GROUPED)] == [
        "none",
        "int8",
        "int4",
        "gguf",
    ]


def test_inspect_repeats_what_was_converted(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "one.gguf"
    write_gguf(path, weights=Kind.Q4_0, shape=WIDE)
    facts = inspect(str(path), LoadOptions(**AS_IS), EngineOptions(), {})
    facts.show()
    assert facts.weights == "gguf" and facts.converted == "Q4_0 to 4 bits (exact), Q4_0 to 8 bits (exact)"
    assert f"from the file    {facts.converted}" in capsys.readouterr().out
