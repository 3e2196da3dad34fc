"""From a folder to a model that says what it said before it was saved; and every way to fail names what failed."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
import transformers
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging

from pilotfish import LLM, SamplingParams
from pilotfish.drafters.none import NoDrafter
from pilotfish.engine.engine import Engine
from pilotfish.errors import ModelError, OptionError
from pilotfish.models.base import CausalLM
from pilotfish.models.disk_cache import cache_folder
from pilotfish.models.huggingface import HuggingFaceLM
from pilotfish.models.load import LoadOptions, _bare_config, from_objects, load
from pilotfish.paged.batch import Feed, lay_out
from tests.models.tiny import VOCAB_SIZE, tiny_model

TEXT = [3, 41, 5, 17, 60, 22, 9]


def tokenizer() -> PreTrainedTokenizerFast:
    """A word per id: w0 to w63."""
    model = FastTokenizer(WordLevel({f"w{i}": i for i in range(VOCAB_SIZE)}, unk_token="w0"))
    model.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=model)


def logits_of(model: CausalLM) -> torch.Tensor:
    cache = model.new_cache(4)
    cache.open("a", TEXT)
    cache.reserve("a", len(TEXT))
    device = model.info.device
    return model.forward(lay_out([Feed("a", TEXT, 0, len(TEXT))], cache, device), cache).logits_NV


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float32 llama with its tokenizer, in a folder."""
    folder = tmp_path_factory.mktemp("models") / "tiny llama"
    tiny_model(dtype=torch.float32, eos_token_id=5).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(saved, tmp_path / "damaged"))


# -- what works --------------------------------------------------------------------------------------------------


def test_a_folder_gives_back_what_was_saved(saved: Path):
    loaded = load(saved, device="cpu")
    info = loaded.model.info
    assert info.name == str(saved) and info.dtype == torch.float32 and info.eos_ids == {5}
    expected = logits_of(HuggingFaceLM(tiny_model(dtype=torch.float32)))
    torch.testing.assert_close(logits_of(loaded.model), expected, rtol=1e-5, atol=1e-5)
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.encode("w3 w41 w5") == [3, 41, 5]
    assert loaded.tokenizer.decode([3, 41, 5]) == "w3 w41 w5"


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_weights_come_in_the_wanted_dtype(saved: Path, dtype: str):
    model = load(str(saved), dtype=dtype, device="cpu").model
    assert model.info.dtype == getattr(torch, dtype)
    assert logits_of(model).dtype == getattr(torch, dtype)


def test_a_folder_may_be_named_relative_to_where_one_is(saved: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(saved.parent)
    assert load(saved.name, device="cpu").model.info.name == saved.name


def test_an_llm_from_a_folder(saved: Path):
    llm = LLM(saved, device="cpu")
    (done,) = llm.generate("w3 w41 w5", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    assert len(done.token_ids) == 8
    assert done.text.split() == [f"w{i}" for i in done.token_ids]


def test_loaded_objects_are_wrapped_as_they_are():
    model = tiny_model()
    loaded = from_objects(model, tokenizer(), "mine")
    assert loaded.model.info.name == "mine" and loaded.tokenizer is not None
    assert loaded.tokenizer.encode("w9") == [9]
    assert from_objects(loaded.model).model is loaded.model
    assert from_objects(model).tokenizer is None


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_model_on_a_gpu(saved: Path):
    on_gpu, on_cpu = load(saved, device="cuda").model, load(saved, device="cpu").model
    assert on_gpu.info.device.type == "cuda" and load(saved).model.info.device.type == "cuda"
    torch.testing.assert_close(logits_of(on_gpu).cpu(), logits_of(on_cpu), rtol=1e-3, atol=1e-3)


def test_progress_bars_are_left_as_they_were(saved: Path, tmp_path: Path):
    before = logging.is_progress_bar_enabled()
    try:
        for set_to, enabled in ((logging.disable_progress_bar, False), (logging.enable_progress_bar, True)):
            set_to()
            load(saved, device="cpu")
            assert logging.is_progress_bar_enabled() == enabled
            (tmp_path / "config.json").write_text("{}")
            with pytest.raises(ModelError):
                load(tmp_path)
            assert logging.is_progress_bar_enabled() == enabled
    finally:
        (logging.enable_progress_bar if before else logging.disable_progress_bar)()


# -- what fails --------------------------------------------------------------------------------------------------


def test_a_missing_folder_is_not_looked_for_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for name in (tmp_path / "nowhere", "./nowhere", "~/surely/nowhere/at/all"):
        with pytest.raises(ModelError, match="there is no folder .*nowhere"):
            load(name)


def test_a_folder_without_a_model(tmp_path: Path):
    with pytest.raises(ModelError, match="no config.json") as caught:
        load(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_a_truncated_weights_file(folder: Path):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(ModelError) as caught:
        load(folder)
    assert str(folder) in str(caught.value) and "safetensor" in str(caught.value).lower()


def test_missing_weights_are_not_made_up(folder: Path):
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"1 weights are missing, model\.layers\.1\.mlp\.up_proj\.weight"):
        load(folder)


def test_no_weights_at_all(folder: Path):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="model.safetensors"):
        load(folder)


def test_an_unknown_architecture(folder: Path):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "lama"}))
    with pytest.raises(ModelError, match="lama"):
        load(folder)


def test_an_architecture_that_is_no_causal_model(folder: Path):
    (folder / "config.json").write_text(json.dumps({"model_type": "vit"}))
    with pytest.raises(ModelError, match="ViTConfig"):
        load(folder)


def test_a_missing_tokenizer(folder: Path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(ModelError, match="the tokenizer of .* cannot be loaded"):
        load(folder)


class Hub:
    """Answers, or fails to."""

    def __init__(self, failure: Exception | None):
        self.failure, self.asked = failure, list[str]()

    def head(self, url: str, timeout: float) -> None:
        self.asked.append(url)
        if self.failure is not None:
            raise self.failure


def test_a_hub_that_is_not_reached_is_asked_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    hub = Hub(OSError("no network"))
    monkeypatch.setattr(huggingface_hub, "get_session", lambda: hub)
    with pytest.raises(ModelError) as caught:
        load("somebody/something")
    assert len(hub.asked) == 1 and hub.asked[0].endswith("/somebody/something/resolve/main/config.json")
    message = str(caught.value)
    assert "there is no folder 'somebody/something'" in message and "\n" not in message
    assert "cannot be reached (OSError: no network); give a model's folder" in message
    # What was fetched before is loaded by the libraries' own rules, and they are not kept from it.
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_words: "there")
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda *_words, **_named: 1 / 0)
    with pytest.raises(ModelError, match="division by zero"):
        load("somebody/something")
    assert "HF_HUB_OFFLINE=1" in capsys.readouterr().err


def test_a_hub_that_must_not_be_asked_is_not(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub, "get_session", lambda: pytest.fail("asked"))
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE forbids"):
        load("somebody/something")


def test_a_name_the_hub_does_not_know(monkeypatch: pytest.MonkeyPatch):
    def offline(source: str, **_options: object) -> None:
        raise OSError(f"{source} is unknown here\nand much more")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", offline)
    monkeypatch.setattr(huggingface_hub, "get_session", lambda: Hub(None))
    with pytest.raises(
        ModelError, match="OSError: somebody/something is unknown here .there is no folder .* the hub.$"
    ):
        load("somebody/something")


def test_gguf_files(tmp_path: Path):
    missing, broken = tmp_path / "missing.gguf", tmp_path / "broken.gguf"
    with pytest.raises(ModelError, match="there is no file .*missing.gguf"):
        load(missing)
    for quantization in ("none", "int8", "gguf"):
        for content in (b"no GGUF at all", b"GGUF" + bytes(3)):
            broken.write_bytes(content)
            with pytest.raises(ModelError) as caught:
                load(broken, quantization=quantization)
            assert str(broken) in str(caught.value) and "/pilotfish-" not in str(caught.value)
            assert str(caught.value).endswith(("begin with GGUF", "head goes on"))
    broken.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ModelError, match=r"broken\.gguf"):
        load(broken)


@pytest.mark.parametrize("dtype", ["int8", "fp16", "", "Float32"])
def test_unknown_dtypes(saved: Path, dtype: str):
    with pytest.raises(OptionError, match="dtype must be auto, float32") as caught:
        load(saved, dtype=dtype)
    assert repr(dtype) in str(caught.value)


@pytest.mark.parametrize("device", ["gpu", "cuda:77", "meta:x", ""])
def test_unknown_devices(saved: Path, device: str):
    with pytest.raises(OptionError, match="device") as caught:
        load(saved, device=device)
    assert repr(device) in str(caught.value)


def test_options_are_checked_before_anything_is_loaded():
    with pytest.raises(OptionError, match="float8"):
        LLM("/nowhere", dtype="float8")
    assert LoadOptions(device="cpu").torch_device == torch.device("cpu")


# -- what a cached quantised model does not need ------------------------------------------------------------------


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that can be quantised."""
    folder = tmp_path_factory.mktemp("models") / "wide"
    shape = {"head_dim": 32, "hidden_size": 64, "intermediate_size": 112}
    tiny_model(dtype=torch.float32, eos_token_id=5, **shape).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def test_its_tokenizer_is_the_one_that_transformers_chooses(
    wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PILOTFISH_CACHE", str(tmp_path / "cache"))
    ours, theirs = load(wide, quantization="int8").tokenizer, transformers.AutoTokenizer.from_pretrained(wide)
    assert ours is not None and type(ours.hf) is type(theirs)
    assert ours.encode("w3 w41 w5") == theirs.encode("w3 w41 w5") and ours.hf.name_or_path == theirs.name_or_path
    assert "config" in _bare_config(wide)


@pytest.mark.parametrize("change", [{"tokenizer_class": None}, {"auto_map": {"AutoTokenizer": ["a.B", None]}}])
def test_a_folder_that_says_too_little_of_its_tokenizer_or_too_much_is_left_to_transformers(
    wide: Path, tmp_path: Path, change: dict[str, object]
):
    folder = Path(shutil.copytree(wide, tmp_path / "other"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | change))
    assert _bare_config(folder) == {}
    assert _bare_config(tmp_path) == {}


def test_once_it_is_cached_no_model_class_is_imported(wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PILOTFISH_CACHE", str(tmp_path))
    load(wide, quantization="int8")
    heavy = {"transformers.modeling_utils", "transformers.core_model_loading", "sympy"}
    assert heavy <= set(sys.modules)  # the negative control: quantising needs the model
    code = (
        "import sys; from pilotfish.models.load import load; "
        f"print(load({str(wide)!r}, quantization='int8').model.info.quantization, {heavy} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "int8 set()\n"


def test_a_model_of_a_test_is_not_kept_in_the_user_s_cache(wide: Path, cache_of_the_tests: Path):
    """Nor what its passes cost."""
    before = set(cache_of_the_tests.glob("**/*"))
    engine = Engine(load(wide, quantization="int8").model, lambda setting: NoDrafter(), num_speculative_tokens="auto")
    assert engine.target.info.quantization == "int8"
    made = {path.relative_to(cache_of_the_tests) for path in set(cache_of_the_tests.glob("**/*")) - before}
    assert {path.name for path in made} > {"weights.bin", "index.json"}
    assert any(path.parent.name == "costs" for path in made)
    assert not [path for path in made if path.name != "costs" and (cache_folder() / path).exists()]
