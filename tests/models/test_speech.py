"""Whisper models from a folder or as objects, through the front door; what their configs say; and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, GenerationConfig, WhisperFeatureExtractor, WhisperProcessor, WhisperTokenizer

from pilotfish import LLM, SamplingParams
from pilotfish.engine.costs import measure
from pilotfish.errors import DraftError, ModelError, OptionError, PromptError
from pilotfish.models.encdec import EncoderDecoder
from pilotfish.models.load import from_objects
from pilotfish.models.speech import features_of
from tests.contract.test_speech import NO_TIMESTAMPS, START, generated, hearing
from tests.models.test_load import tokenizer
from tests.models.tiny import sound, tiny_model, tiny_pair

GREEDY = SamplingParams(temperature=0, max_tokens=8)
SOUND = sound(1).values.numpy()
LANGUAGES = {"lang_to_id": {"<|en|>": 50, "<|de|>": 51}, "task_to_id": {"transcribe": 52}}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM.from_model(hearing(), tokenizer(), method="ngram", max_model_len=40)


def test_prompts_in_all_their_forms(llm: LLM):
    """Arrays and tensors; a beginning as ids and as text, with the start token and without."""
    begun = [START, 7, NO_TIMESTAMPS]
    expected = [generated(hearing(), sound(1), GREEDY, own) for own in ([START, NO_TIMESTAMPS], begun)]
    heard = {"input_features": SOUND}
    usual: list[Any] = [
        heard,
        heard | {"prompt": None},
        {"input_features": torch.tensor(SOUND)},
        heard | {"prompt": ""},
    ]
    given: list[Any] = [heard | {"prompt": own} for own in (begun, begun[1:], f"w7 w{NO_TIMESTAMPS}")]
    done = llm.generate([*usual, *given], GREEDY)
    assert [list(one.token_ids) for one in done] == [expected[0]] * 4 + [expected[1]] * 3
    assert done[0].text.split() == [f"w{token}" for token in expected[0]]
    assert (done[0].usage.prompt_tokens, done[-1].usage.prompt_tokens, done[0].usage.completion_tokens) == (2, 3, 8)
    assert [one.token_ids for one in llm.generate(heard, GREEDY)] == [done[0].token_ids]
    chunks = list(llm.stream(heard, GREEDY, reference=done[0].text))
    assert chunks[-1].completion is not None and chunks[-1].completion.token_ids == done[0].token_ids


def test_a_sound_is_copied_when_it_is_given(llm: LLM):
    values = SOUND.copy()
    request = llm._add_all([{"input_features": values}], GREEDY, None, None)[0]
    values[:] = 0
    while not request.finish:
        llm._step()
    assert request.output == generated(hearing(), sound(1), GREEDY, [START, NO_TIMESTAMPS])


def _config() -> GenerationConfig:
    """As of a stored model; what is changed in a made one is not stored."""
    rules = {"no_timestamps_token_id": NO_TIMESTAMPS, "begin_suppress_tokens": [9]}
    return GenerationConfig(decoder_start_token_id=START, pad_token_id=0, **rules)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_folder_and_its_draft(tmp_path: Path, dtype: str):
    """Weights of another dtype than the features'; from a folder, as Whisper's are stored."""
    for name, seed in (("target", 0), ("draft", 1)):
        model = tiny_pair("whisper", seed=seed, dtype=getattr(torch, dtype), tied=True)
        model.generation_config = _config()
        model.save_pretrained(tmp_path / name)
        tokenizer().save_pretrained(tmp_path / name)
    llm = LLM(tmp_path / "target", device="cpu", draft_model=tmp_path / "draft", num_speculative_tokens=4)
    info = llm.engine.target.info
    assert info.dtype == getattr(torch, dtype) and info.reads == "features of 6 mel bins and 20 frames"
    assert info.decoder_prompt == (START, NO_TIMESTAMPS) and info.speech and info.speech.suppressed_first == (9,)
    (done,) = llm.generate({"input_features": SOUND}, GREEDY)
    assert done.speculative_decoding["num_draft_tokens"] > 0
    if dtype == "float32":
        stock = tiny_pair("whisper", dtype=torch.float32, tied=True)
        stock.generation_config = _config()
        features = features_of(SOUND.astype(np.float32))
        assert list(done.token_ids) == generated(stock, features, GREEDY, [START, NO_TIMESTAMPS])


SPECIAL = ["<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>"]


def hearing_processor() -> tuple[Any, WhisperProcessor, np.ndarray]:
    """A tiny model, transformers' own extractor, a tokenizer with real special tokens, and a second of sound."""
    letters = {letter: place for place, letter in enumerate("abcdefghijklmnopqrstuvwxyzĠ")}
    own = WhisperTokenizer(vocab={**letters, "<|endoftext|>": 59}, merges=[])
    own.add_special_tokens({"additional_special_tokens": SPECIAL})
    ids = own.convert_tokens_to_ids(SPECIAL)
    model: Any = tiny_pair("whisper", decoder_start_token_id=ids[0], max_source_positions=50, eos_token_id=59)
    model.generation_config.no_timestamps_token_id = ids[3]
    processor = WhisperProcessor(WhisperFeatureExtractor(feature_size=6, chunk_length=1), own)
    return model, processor, np.sin(np.arange(16_000) ** 1.5 / 900).astype(np.float32)


def test_a_processor_brings_features_and_tokenizer():
    """From a wave to a text."""
    model, processor, wave = hearing_processor()
    ids = processor.tokenizer.convert_tokens_to_ids(SPECIAL)
    batch = processor(wave, sampling_rate=16_000, return_tensors="pt")
    llm = LLM.from_model(model, processor, method="suffix")
    (done,) = llm.generate({"input_features": batch.input_features[0], "prompt": "".join(SPECIAL)}, GREEDY)
    stock = model.generate(
        batch.input_features.double(), decoder_input_ids=torch.tensor([ids]), max_new_tokens=8, do_sample=False,
        force_unique_generate_call=True,
    )  # fmt: skip
    assert [*ids, *done.token_ids] == stock[0].tolist()
    assert done.text == processor.tokenizer.decode(stock[0], skip_special_tokens=True) and done.text


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu():
    expected = generated(hearing(), sound(1), GREEDY, [START, NO_TIMESTAMPS])
    llm = LLM.from_model(hearing().to("cuda"), method="suffix", num_speculative_tokens=6)
    assert list(llm.generate({"input_features": SOUND}, GREEDY)[0].token_ids) == expected


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "error", "says"),
    [
        ("w3 w4", PromptError, "6 mel bins and 20 frames, not a prompt of text; give LLM.generate {'input"),
        ([3, 4], PromptError, "reads features of 6 mel bins"),
        ({"prompt": "w3"}, PromptError, "only for a model that hears it is a mapping, with 'input_features'"),
        ({"input_features": SOUND, "promt": "w3"}, OptionError, "unknown key of a prompt 'promt'; did you mean"),
        ({"input_features": SOUND[:5]}, PromptError, "reads 6 mel bins of 20 frames, and input_features are 5 x 20"),
        ({"input_features": SOUND[:, :19]}, PromptError, "input_features are 6 x 19"),
        ({"input_features": SOUND.T}, PromptError, "input_features are 20 x 6"),
        ({"input_features": SOUND[None]}, PromptError, r"shape \(1, 6, 20\); .* such as batch.input_features\[0\]"),
        ({"input_features": SOUND[0]}, PromptError, r"not of shape \(20,\)"),
        ({"input_features": np.where(SOUND > 2, np.nan, SOUND)}, PromptError, "must be finite"),
        ({"input_features": np.where(SOUND > 2, np.inf, SOUND)}, PromptError, "must be finite"),
        ({"input_features": SOUND.astype(int)}, PromptError, "must be floats, not int64"),
        ({"input_features": "w3"}, PromptError, "cannot be read as an array"),
        ({"input_features": [[1.0], [1.0, 2.0]]}, PromptError, "cannot be read as an array"),
        ({"input_features": SOUND, "prompt": [START, 7]}, PromptError, r"no token 63 \(<\|notimestamps\|>\) behind"),
        ({"input_features": SOUND, "prompt": [NO_TIMESTAMPS, START, 7]}, PromptError, "put it at the end"),
        ({"input_features": SOUND, "prompt": [64, NO_TIMESTAMPS]}, PromptError, "prompt token 64 is not an id from 0"),
        ({"input_features": SOUND, "prompt": [7] * 39 + [63]}, PromptError, "41 tokens and the context 40"),
    ],
)  # fmt: skip
def test_prompts_that_cannot_be_served(llm: LLM, prompt: Any, error: type[Exception], says: str):
    assert (SOUND > 2).any()
    with pytest.raises(error, match=says):
        llm.generate([{"input_features": SOUND}, prompt], GREEDY)
    assert not llm.engine.has_work


@pytest.mark.parametrize(
    "build", [lambda: tiny_pair("t5"), lambda: tiny_pair("bart"), tiny_model], ids=["t5", "bart", "llama"]
)
def test_a_model_that_reads_text_is_not_given_sounds(build: Callable[[], Any]):
    with pytest.raises(PromptError, match="reads text, not features of a sound; give the prompt as text or token ids"):
        LLM.from_model(build()).generate({"input_features": SOUND, "prompt": [1, 2]}, GREEDY)


@pytest.mark.parametrize("method", ["draft_model", "staged"])
def test_a_draft_that_hears_something_else_is_refused(method: str):
    drafts: list[tuple[Any, str]] = [
        (tiny_pair("t5"), "reads text and .* reads features of 6 mel bins and 20 frames"),
        (tiny_pair("whisper", num_mel_bins=8), "reads features of 8 mel bins"),
        (tiny_pair("whisper", max_source_positions=12), "and 24 frames"),
        (tiny_model(), "choose a draft of the same kind"),
    ]
    for draft, says in drafts:
        with pytest.raises(DraftError, match=says):
            LLM.from_model(hearing(), method=method, draft_model=from_objects(draft))
    with pytest.raises(DraftError, match="reads features .* and .* reads text"):
        LLM.from_model(tiny_pair("t5"), method=method, draft_model=from_objects(hearing()))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (LANGUAGES, "which language it hears is not given, and is not detected here; give the beginning yourself"),
        (LANGUAGES | {"forced_decoder_ids": [[1, None], [2, 52]]}, "which language it hears"),
        (LANGUAGES | {"language": "klingon"}, "no token for the language 'klingon'"),
        (LANGUAGES | {"language": "english", "task": "translate"}, "no token for the task 'translate'"),
        ({"return_timestamps": True}, "asks for timestamps, whose rules are not applied here"),
        ({"forced_decoder_ids": [[1, 50], [3, 52]]}, "leave a gap"),
    ],
)
def test_what_cannot_be_said_without_a_beginning_can_be_with_one(settings: dict[str, Any], says: str):
    llm = LLM.from_model(hearing(**settings))
    with pytest.raises(PromptError, match=says):
        llm.generate({"input_features": SOUND}, GREEDY)
    begun = [50, 52, NO_TIMESTAMPS]
    (done,) = llm.generate({"input_features": SOUND, "prompt": begun}, GREEDY)
    assert list(done.token_ids) == generated(hearing(), sound(1), GREEDY, [START, *begun])


def test_a_model_without_a_head():
    bare: Any = AutoModel.from_config(tiny_pair("whisper").config)
    with pytest.raises(ModelError, match="says no tokens; load it with AutoModelForSpeechSeq2Seq"):
        LLM.from_model(bare)


def test_a_model_that_computes_something_else_is_noticed():
    """The self-check: here, a head that does more than ours."""
    model = hearing()
    stock = model.forward
    model.forward = lambda **inputs: _bent(stock(**inputs))
    with pytest.raises(ModelError, match="gives other logits"):
        EncoderDecoder(model)


def _bent(output: Any) -> Any:
    output.logits = output.logits * torch.linspace(0.5, 1, output.logits.shape[-1])
    return output


def test_what_passes_cost_is_measured_with_a_sound():
    model = EncoderDecoder(hearing())
    points, _ = measure(model, seconds=0)
    assert set(points) >= {1, 2, 8} and all(seconds > 0 for seconds in points.values())
    assert "speech" not in repr(model.info), "what was measured of other models is found by their repr"


def test_user_s_rules_and_the_model_s_are_both_kept():
    llm = LLM.from_model(hearing())
    assert llm.engine.target.info.speech is not None
    params = SamplingParams(temperature=0, logit_bias={3: 2.0, 5: 7.0}, begin_suppress_tokens=[8])
    ruled = llm.engine.target.info.ruled(params)
    assert ruled.logit_bias == {3: 2.0, **dict.fromkeys([5, 17, 40, 41, 60], -float("inf"))}
    assert ruled.begin_suppress_tokens == (8, 22, 9, 33) and params.begin_suppress_tokens == (8,)
    with pytest.raises(OptionError, match="begin_suppress_tokens names token 64"):
        llm.generate({"input_features": SOUND}, SamplingParams(begin_suppress_tokens=[64]))
