"""Encoder-decoder models from a folder or as objects, through the front door; and those that are refused, and why."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel

from pilotfish import LLM, SamplingParams
from pilotfish.errors import ModelError, PromptError
from pilotfish.models.encdec import EncoderDecoder
from pilotfish.models.load import from_objects, load
from pilotfish.train.options import MedusaOptions
from pilotfish.train.run import run_train
from tests.models.test_load import tokenizer
from tests.models.tiny import build, tiny_pair

SOURCE = [3, 41, 5, 17, 60, 22, 9]
GREEDY = SamplingParams(temperature=0, max_tokens=10)


def stock_text(model: Any, source: list[int], num_tokens: int = 10) -> list[int]:
    """By transformers' own generate, without its cache (which expects as many encoder as decoder layers)."""
    ids = torch.tensor([source])
    with torch.inference_mode():
        return model.generate(ids, max_new_tokens=num_tokens, do_sample=False, use_cache=False)[0, 1:].tolist()


@pytest.fixture(scope="module", params=["t5", "bart", "marian"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("models") / request.param
    tiny_pair(request.param, dtype=torch.float32, tied=True).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def test_a_folder_gives_back_what_was_saved(folder: Path):
    llm = LLM(folder, device="cpu", method="ngram")
    info = llm.engine.target.info
    assert info.encoder_decoder and info.decoder_prompt == (1,) and info.implementation == "native"
    text = " ".join(f"w{token}" for token in SOURCE)
    (done,) = llm.generate(text, GREEDY)
    assert list(done.token_ids) == stock_text(tiny_pair(folder.name, dtype=torch.float32, tied=True), SOURCE)
    assert done.text.split() == [f"w{token}" for token in done.token_ids]
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (7, 10)
    chunks = list(llm.stream(SOURCE, GREEDY, reference=text))
    assert chunks[-1].completion is not None and chunks[-1].completion.token_ids == done.token_ids


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_in_half_precision(folder: Path, dtype: str):
    """T5 keeps a part of its weights in float32; the self-check has compared with the stock model."""
    model = load(str(folder), dtype=dtype, device="cpu").model
    assert model.info.dtype == getattr(torch, dtype)
    llm = LLM.from_model(model)
    assert len(llm.generate([SOURCE], GREEDY)[0].token_ids) == 10


@pytest.mark.parametrize("kind", ["t5", "mt5", "bart"])
def test_around_a_loaded_model_of_transformers(kind: str):
    """Prompts of several lengths together are what generate says to each alone; the end of text inside a run too."""
    model = tiny_pair(kind)
    sources = [SOURCE, [7, 8, 9] * 5, [2]]
    expected = [stock_text(model, source) for source in sources]
    llm = LLM.from_model(model, draft_model=from_objects(tiny_pair(kind)), num_speculative_tokens=6)
    assert [list(one.token_ids) for one in llm.generate(sources, GREEDY)] == expected
    for source, text in zip(sources, expected, strict=True):
        for end in {0, 4, 7}:
            params = SamplingParams(temperature=0, max_tokens=10, stop_token_ids=[text[end]])
            (done,) = llm.generate([source], params)
            assert list(done.token_ids) == text[: text.index(text[end]) + 1]
            assert done.finish_reason == "stop"
    assert not llm.engine.cache.sequences and not llm.engine.drafter.cache._readings


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kind", ["t5", "marian"])
def test_on_a_gpu(kind: str):
    model = tiny_pair(kind)
    expected = [stock_text(model, source) for source in (SOURCE, [2])]
    llm = LLM.from_model(model.to("cuda"), method="suffix", num_speculative_tokens=6)  # type: ignore[arg-type]
    assert [list(one.token_ids) for one in llm.generate([SOURCE, [2]], GREEDY)] == expected


def test_a_forced_first_token_is_part_of_the_beginning():
    model = tiny_pair("bart")
    model.generation_config.forced_bos_token_id = 9
    expected = stock_text(model, SOURCE)
    assert expected[0] == 9
    llm = LLM.from_model(model)
    assert llm.engine.target.info.decoder_prompt == (1, 9)
    assert list(llm.generate([SOURCE], SamplingParams(temperature=0, max_tokens=9))[0].token_ids) == expected[1:]


def test_a_model_in_training_is_run_without_dropout_and_stays_in_training():
    model = tiny_pair("t5", dropout_rate=0.5)
    calm = stock_text(model, SOURCE)
    llm = LLM.from_model(model)
    model.train()
    model.encoder.block[0].eval()
    assert list(llm.generate([SOURCE], GREEDY)[0].token_ids) == calm
    assert model.training and model.decoder.block[1].training and not model.encoder.block[0].training


# -- refusals --------------------------------------------------------------------------------------------------------


def refused(model: Any) -> str:
    with pytest.raises(ModelError) as caught:
        EncoderDecoder(model, "its-name")
    assert "its-name" in str(caught.value)
    return str(caught.value)


def test_a_model_without_a_start_token():
    model = tiny_pair("t5", decoder_start_token_id=None)
    model.generation_config.decoder_start_token_id = None
    assert "has no decoder start token; set decoder_start_token_id" in refused(model)


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_a_model_without_a_head(kind: str):
    bare: Any = AutoModel.from_config(tiny_pair(kind).config)
    with pytest.raises(ModelError, match="Model says no tokens; load it with AutoModelForSeq2SeqLM"):
        LLM.from_model(bare)


def test_a_family_that_is_not_known():
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 32, "pad_token_id": 0}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    model = build(AutoConfig.for_model("blenderbot-small", **sizes, **heads), pair=True)
    assert "of family 'blenderbot-small' are not supported; these are: t5, mt5" in refused(model)


def test_a_model_that_reads_and_writes_different_vocabularies():
    model = tiny_pair(
        "marian", share_encoder_decoder_embeddings=False, decoder_vocab_size=48, tie_word_embeddings=False
    )
    assert "its encoder knows 64 tokens and its decoder 48" in refused(model)


@pytest.mark.parametrize("part", ["norm", "bias"])
def test_a_model_that_computes_something_else_is_noticed(part: str):
    """The self-check: what the dialect does not know of would change the text."""
    model = tiny_pair("t5")
    if part == "norm":
        model.decoder.final_layer_norm.forward = lambda x: x
        stock = model.decoder.forward
        model.decoder.forward = lambda *args, **more: _halved(stock(*args, **more))
    else:
        model.decoder.block[1].layer[0].SelfAttention.relative_attention_bias = torch.nn.Embedding(8, 4).double()
    assert "gives other logits" in refused(model)


def _halved(output: Any) -> Any:
    output.last_hidden_state = output.last_hidden_state * torch.linspace(0.5, 1, output.last_hidden_state.shape[-1])
    return output


def test_what_is_for_decoder_only_models(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(ModelError, match="decoder is always run by our code, not by 'hf'"):
        load(folder, device="cpu", model_impl="hf")
    with pytest.raises(ModelError, match="heads are for decoder-only models"):
        load(folder, device="cpu").model.ends()
    with pytest.raises(ModelError, match="heads are trained for decoder-only models"):
        run_train(MedusaOptions(out=str(tmp_path / "head")), str(folder), {"quantization": "none", "device": "cpu"})
    load(folder, device="cpu", quantization="int8")
    assert "cannot be quantised" in capsys.readouterr().err


def test_prompts_that_cannot_be_served():
    llm = LLM.from_model(tiny_pair("marian"), max_model_len=20)
    for prompt, reason in (([], "empty"), ([64], "not an id from 0 to 63"), ([1] * 129, "encoder of .* takes 128")):
        with pytest.raises(PromptError, match=reason):
            llm.generate([prompt], GREEDY)
    (done,) = llm.generate([[1] * 128], SamplingParams(temperature=0, max_tokens=50))
    assert (done.usage.completion_tokens, done.finish_reason) == (19, "length"), "the source takes no room in the text"
