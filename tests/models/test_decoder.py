"""Our own decoder in float against transformers' code, family by family, on plain rows, chunks, trees and batches."""

from typing import Any

import pytest
import torch

from pilotfish.errors import ModelError
from pilotfish.models.architecture import FAMILIES, Architecture, describe, unsupported
from pilotfish.models.base import CausalLM
from pilotfish.models.decoder import Decoder
from pilotfish.models.huggingface import HuggingFaceLM
from pilotfish.paged.batch import Feed, lay_out

from .tiny import VOCAB_SIZE, tiny_model

LLAMA_3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
           "high_freq_factor": 4.0, "original_max_position_embeddings": 32}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, biased and tied": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama 3": ("llama", {"rope_parameters": LLAMA_3}),
    "smollm": ("llama", {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "gemma3": ("gemma3_text", {}),
}
TOKENS = [(13 * i + 5) % VOCAB_SIZE for i in range(20)]


def all_logits(lm: CausalLM) -> torch.Tensor:
    """Two sequences, one in two chunks, and then a tree and a chain in one batch."""
    cache = lm.new_cache(16, 4)
    for name in ("a", "b"):
        cache.open(name, [])
        assert cache.reserve(name, 30)
    feeds = [
        [Feed("a", TOKENS, 0, 20), Feed("b", TOKENS[3:9], 0, 6)],
        [Feed("b", TOKENS[9:12], 6, 3)],
        [Feed("a", [5, 6, 7, 8, 9], 20, 5, ancestors=(0b1, 0b11, 0b101, 0b1101)), Feed("b", [1, 2, 3], 9, 2)],
    ]
    return torch.cat([lm.forward(lay_out(group, cache), cache).logits_NV for group in feeds])


@pytest.mark.parametrize("case", CASES)
def test_agrees_with_transformers(case: str) -> None:
    kind, overrides = CASES[case]
    model = tiny_model(kind, **overrides)
    oracle = HuggingFaceLM(model)
    wanted = all_logits(oracle)
    ours = Decoder(model)
    assert ours.info.implementation == "native"
    assert oracle.info.layers == ours.info.layers and oracle.info.eos_ids == ours.info.eos_ids
    scale = float(wanted.abs().max())
    assert float((all_logits(ours) - wanted).abs().max()) <= 1e-9 * scale
    # The model lent its weights, and still works.
    assert float((all_logits(oracle) - wanted).abs().max()) <= 1e-12 * scale


def test_every_family_is_tested() -> None:
    assert {kind for kind, _ in CASES.values()} == set(FAMILIES)


def test_float32() -> None:
    model = tiny_model("qwen2", dtype=torch.float32)
    wanted, ours = all_logits(HuggingFaceLM(model)), all_logits(Decoder(model))
    assert ours.dtype == torch.float32
    assert float((ours - wanted).abs().max()) < 1e-4 * float(wanted.abs().max())


def test_taps_and_single_layers_are_those_of_transformers() -> None:
    model = tiny_model()
    results = []
    for lm in (HuggingFaceLM(model), Decoder(model)):
        cache = lm.new_cache(2)
        cache.open("a", [])
        cache.reserve("a", 8)
        batch = lay_out([Feed("a", TOKENS[:8], 0, 1)], cache)
        whole = lm.forward(batch, cache, taps=(0, 2))
        part = lm.forward(batch, cache, layers=(0, 2))
        results.append([whole.taps[0], whole.taps[2], whole.logits_NV, part.logits_NV])
    for theirs, ours in zip(*results, strict=True):
        assert torch.allclose(theirs, ours, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(results[1][2], results[1][3])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"taps": (3,)}, "layer 3 cannot be tapped"),
        ({"taps": (1,), "layers": (0, 2)}, "layer 1 cannot be tapped"),
        ({"layers": (1, 5)}, "layer 5 cannot be run alone: the model has layers 0 to 2"),
    ],
)
def test_a_layer_that_does_not_run_is_named(options: dict[str, Any], message: str) -> None:
    lm = Decoder(tiny_model())
    cache = lm.new_cache(1)
    cache.open("a", [])
    cache.reserve("a", 1)
    with pytest.raises(ModelError, match=message):
        lm.forward(lay_out([Feed("a", [1], 0, 1)], cache), cache, **options)


def test_a_decoder_that_disagrees_is_refused_at_load() -> None:
    model = tiny_model()
    mlp = model.model.layers[1].mlp
    mlp.act_fn = torch.nn.ReLU()  # the config still says silu
    with pytest.raises(ModelError, match="other logits"):
        Decoder(model)


@pytest.mark.parametrize(
    ("kind", "overrides", "reason"),
    [
        ("gpt2", {}, "family 'gpt2' is not one of"),
        ("llama", {"hidden_act": "relu"}, "activation 'relu' is not one of"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is set"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "change with the"),
    ],
)
def test_what_does_not_fit_is_said(kind: str, overrides: dict[str, Any], reason: str) -> None:
    model = tiny_model(kind, **overrides)
    assert reason in str(unsupported(model.config))
    with pytest.raises(ModelError, match="does not fit the native decoder"):
        Decoder(model)
    assert unsupported(tiny_model().config) is None


def test_facts_survive_json() -> None:
    facts = describe(tiny_model("gemma3_text"))
    assert facts.windows == (6, None, 6) and set(facts.rotations) == {0, 1}
    assert Architecture.from_json(facts.to_json()) == facts
