"""Options of `LLM`: each reaches its owner, names from elsewhere are understood, and a misspelt one is met with the
nearest real one."""

from pathlib import Path
from typing import Any

import pytest
import torch

from pilotfish import LLM, DraftError, ModelError, OptionError, SamplingParams
from pilotfish.models import kernels
from pilotfish.models.load import Loaded
from tests.adversaries import untrained_head
from tests.fakes import ByteTokenizer, TableModel, oracle
from tests.models.test_load import tokenizer as word_tokenizer
from tests.models.tiny import VOCAB_SIZE, tiny_model

MODEL = TableModel(64, order=1, num_phases=5, seed=2, sharpness=2.0)
TOKENIZER = ByteTokenizer(64, first_byte=32)
DRAFT = Loaded(TableModel(64, order=1, num_phases=5, seed=2, sharpness=2.0), TOKENIZER)
GREEDY = SamplingParams(temperature=0, max_tokens=16)


def llm(**options: Any) -> LLM:
    return LLM.from_model(Loaded(MODEL, TOKENIZER), **options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_num_sequences": 3}, "unknown option 'max_num_sequences'; did you mean 'max_num_seqs'?"),
        ({"metod": "ngram"}, "did you mean 'method'?"),
        ({"prompt_lookup_mx": 3}, "did you mean 'prompt_lookup_max'?"),
        ({"qqqqqqqq": 3}, "unknown option 'qqqqqqqq'; known: "),
        ({"method": "n-gram"}, "unknown method 'n-gram'; did you mean 'ngram'?"),
        ({"method": "ngram", "draft_sample_method": "greedy"}, "unknown option for method 'ngram'"),
        ({"method": "ngram", "num_speculative_tokens": -1}, "from 0 to 63 or auto, not -1"),
        ({"method": "ngram", "num_speculative_tokens": 64}, "from 0 to 63 or auto, not 64"),
        ({"num_speculative_tokens": 3}, "needs a method"),
        ({"speculative_config": {"method": "ngram"}, "method": "suffix"}, "'method' is given twice"),
        ({"speculative_config": {"model": "a"}, "draft_model": "b"}, "'draft_model' is given twice"),
        ({"draft_model": "a", "assistant_model": "b"}, "'assistant_model' and 'model' mean the same; give one"),
        ({"max_num_seqs": 0}, "max_num_seqs must be above 0, not 0"),
        ({"dtype": "float32"}, "belong to loading"),
        ({"dtype": "float33"}, "dtype must be auto"),
        (
            {"speculative_config": "ngram"},
            "speculative_config must be a mapping such as {'method': 'ngram'}, not 'ngram'",
        ),
        ({"speculative_config": {"method": "ngram", 5: 1}}, "keys of a speculative config are names, not 5"),
        ({"speculative_config": {"metod": "ngram"}}, "unknown option 'metod'; did you mean 'method'?"),
        ({"method": "ngram", "rejection_sample_method": ["block"]}, "unknown rejection_sample_method"),
        ({"method": "suffix", "suffix_decoding_trees": "no"}, "suffix_decoding_trees must be True or False, not 'no'"),
        ({"draft_model": DRAFT, "draft_max_model_len": "x"}, "max_model_len must be 1 or more, not 'x'"),
        ({"device": "abacus"}, "device 'abacus' cannot be used"),
        ({"method": "layer_skip", "rejection_sample_method": "blck"}, "did you mean 'block'?"),
    ],
)
def test_options_that_cannot_be_meant(options, says):
    with pytest.raises(OptionError) as caught:
        llm(**options)
    assert says in str(caught.value)


def test_options_reach_their_owners():
    one = llm(
        draft_model=DRAFT,
        num_speculative_tokens=2,
        draft_sample_method="greedy",
        rejection_sample_method="block",
        draft_max_model_len=40,
        max_model_len=50,
        max_num_seqs=3,
        max_num_batched_tokens=30,
        block_size=8,
        num_pages=20,
        enable_prefix_caching=False,
    )
    engine = one.engine
    assert (engine.max_length, engine.rule, engine.num_speculative_tokens) == (50, "block", 2)
    assert (engine.options.max_num_seqs, engine.options.max_num_batched_tokens) == (3, 30)
    assert (engine.cache.page_size, engine.cache.pool.num_pages, engine.cache.prefix_sharing) == (8, 20, False)
    drafter: Any = engine.drafter
    assert (drafter.options.draft_sample_method, drafter.context, drafter.model) == ("greedy", 40, DRAFT.model)


@pytest.mark.parametrize(
    ("options", "method", "k"),
    [
        ({"assistant_model": DRAFT, "num_assistant_tokens": 4}, "draft_model", 4),
        ({"prompt_lookup_num_tokens": 6}, "ngram", 6),
        ({"prompt_lookup_num_tokens": 6, "max_matching_ngram_size": 2}, "ngram", 6),
        ({"draft_model": DRAFT}, "draft_model", "auto"),
        ({"speculative_config": {"method": "ngram"}, "num_speculative_tokens": 0}, "ngram", 0),
        ({"method": "none", "num_speculative_tokens": 7}, "none", 0),
        ({"num_speculative_tokens": 63, "method": "suffix"}, "suffix", 63),
    ],
)
def test_names_from_elsewhere(options, method, k):
    one = llm(**options)
    assert (one.speculation.method, one.engine.num_speculative_tokens) == (method, k)
    assert one.generate("A", GREEDY)[0].token_ids == oracle(MODEL.logits_of, TOKENIZER.encode("A"), GREEDY)


def test_draft_models_that_do_not_fit():
    with pytest.raises(DraftError, match="needs a draft model"):
        llm(method="draft_model")
    with pytest.raises(ModelError, match="there is no folder /no/such/model"):
        llm(draft_model="/no/such/model")
    shifted = Loaded(TableModel(64), ByteTokenizer(64, first_byte=33))
    with pytest.raises(DraftError, match="token 0 is 'byte32' in the target and 'byte33' in the draft"):
        llm(method="staged", draft_model=shifted)
    foreign = Loaded(TableModel(64), ByteTokenizer(64, first_byte=128))
    with pytest.raises(DraftError, match="has another vocabulary than table, and the two have no token in common"):
        llm(draft_model=foreign)


def test_it_says_what_runs():
    assert llm().describe() == "table (float64, cpu) | method none | rule rejection | lossless"
    shifted = Loaded(TableModel(64, name="shifted"), ByteTokenizer(64, first_byte=31))
    about = "shifted, another vocabulary, 62 of 64 tokens shared, scheme intersection"
    assert f"method draft_model ({about}), K 3" in llm(draft_model=shifted, num_speculative_tokens=3).describe()
    assert (
        "method draft_model (table), K 3 | rule block"
        in llm(draft_model=DRAFT, num_speculative_tokens=3, rejection_sample_method="block").describe()
    )


@pytest.mark.parametrize("model", [None, 5, b"demo", ["demo"]], ids=str)
def test_what_is_no_model(model):
    with pytest.raises(ModelError, match="a model is named by a folder"):
        LLM(model)
    with pytest.raises(ModelError, match="a loaded transformers model is wanted"):
        LLM.from_model(model)


def test_bounds_beyond_all_text_are_as_good_as_none():
    one = llm(method="ngram", prompt_lookup_max=10**12, kv_cache_memory=float("inf"))
    assert one.generate("A", GREEDY)[0].token_ids == oracle(MODEL.logits_of, TOKENIZER.encode("A"), GREEDY)


@pytest.fixture
def wide(tmp_path: Path) -> str:
    """A model that can be quantised, and drafts for itself."""
    folder = str(tmp_path / "wide")
    shape = {"head_dim": 32, "hidden_size": 64, "intermediate_size": 112}
    tiny_model(dtype=torch.float32, **shape).save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder


class NoLibraryError(Exception):
    """The C++ kernels were wanted."""


@pytest.mark.parametrize("drafting", ["draft_model", "staged", "eagle3", "medusa"])
@pytest.mark.parametrize("weights", ["int8", "none"])
def test_kernels_are_those_of_all_that_is_loaded(wide, weights, drafting, monkeypatch):
    """A target, its draft model, and heads, which are quantised beside a float target too."""
    model: Any = wide
    if drafting in ("eagle3", "medusa"):
        model = untrained_head(drafting, 64, VOCAB_SIZE, 3)
    config = {"method": drafting, "model": model, "quantization": "int8", "num_speculative_tokens": 2}
    options: dict[str, Any] = {"quantization": weights, "device": "cpu", "num_pages": 8}

    def none_to_be_had():
        raise NoLibraryError

    LLM(wide, **options, kernels="numba")  # made and kept
    monkeypatch.setattr(kernels, "library", none_to_be_had)
    LLM(wide, **options, kernels="numba", speculative_config=config)
    with pytest.raises(NoLibraryError):
        LLM(wide, **options, speculative_config=config)


def test_kernels_are_no_matter_of_a_float_draft(wide, monkeypatch):
    monkeypatch.setattr(kernels, "library", object)
    config = {"model": wide, "quantization": "none", "num_speculative_tokens": 2}
    one = LLM(wide, quantization="int8", kernels="native", device="cpu", num_pages=8, speculative_config=config)
    assert one.engine.drafter.model.info.quantization == "none"  # type: ignore[attr-defined]
