"""Models that must be refused and why, models that must be left as they were found, and what is known of the rest."""

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AttentionInterface, AutoConfig, AutoModelForSeq2SeqLM, PreTrainedModel

from pilotfish.errors import ModelError
from pilotfish.models import huggingface
from pilotfish.models.huggingface import HuggingFaceLM
from pilotfish.paged.batch import Batch, Feed, lay_out
from pilotfish.paged.cache import KVCache, LayerShape
from tests.models.tiny import tiny_model

TEXT = [3, 41, 5, 17, 60, 22, 9]


def one_pass(model: HuggingFaceLM, num_wanted: int = 1) -> tuple[Batch, KVCache]:
    cache = model.new_cache(4)
    cache.open("a", TEXT)
    cache.reserve("a", len(TEXT))
    return lay_out([Feed("a", TEXT, 0, num_wanted)], cache), cache


def generated(model: PreTrainedModel) -> list[int]:
    return model.generate(torch.tensor([TEXT]), max_new_tokens=12, do_sample=False)[0].tolist()


# -- refusals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "overrides", "reason"),
    [
        ("bloom", {"n_layer": 2, "n_head": 4}, "_supports_attention_backend"),
        ("stablelm", {}, "_supports_attention_backend"),
        ("mamba", {"state_size": 4}, "linear_attention"),
        ("jamba", {"num_experts": 1, "num_experts_per_tok": 1, "mamba_d_state": 4}, "mamba"),
        ("falcon_h1", {"mamba_d_state": 4, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8}, "hybrid"),
        ("lfm2", {"layer_types": ["conv", "full_attention", "conv"]}, "conv"),
        ("llama4_text", {"num_local_experts": 2, "intermediate_size_mlp": 48}, "chunked_attention"),
        ("diffllama", {}, "must attend just once"),
        ("doge", {}, "attention mask of its own"),
    ],
)
def test_what_cannot_work_is_refused_with_its_reason(kind: str, overrides: dict[str, Any], reason: str):
    with pytest.raises(ModelError, match=reason) as caught:
        HuggingFaceLM(tiny_model(kind, **overrides), "its-name")
    assert "its-name" in str(caught.value)


def test_encoder_decoder_models_are_refused():
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 32}
    model = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("t5", **sizes))
    with pytest.raises(ModelError, match="encoder-decoder"):
        HuggingFaceLM(model)


def refused(model: PreTrainedModel) -> str:
    with pytest.raises(ModelError) as caught:
        HuggingFaceLM(model, "odd")
    return str(caught.value)


def test_a_layer_that_does_not_attend_through_us_is_noticed():
    model = tiny_model()
    model.model.layers[1].self_attn.forward = lambda hidden_states, **_: (hidden_states * 0.5, None)
    assert "2 of 3 layers" in refused(model)


def test_a_layer_that_keeps_to_the_stock_attention_is_noticed():
    model = tiny_model()
    config = type(model.config).from_dict(model.config.to_dict())
    config._attn_implementation = "sdpa"
    model.model.layers[2].self_attn.config = config
    assert "2 of 3 layers" in refused(model)


def test_rows_that_mix_outside_of_attention_are_noticed():
    """A convolution over the text, say: right within a pass, wrong across two."""
    model = tiny_model()
    mlp = model.model.layers[0].mlp
    plain = mlp.forward
    mlp.forward = lambda x: plain(x) + 0.1 * torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
    assert "gives other logits" in refused(model)


def test_a_model_that_looks_at_the_whole_pass_is_noticed():
    """Its own text alone would not show it: the check has two sequences in one pass."""
    model = tiny_model()
    norm = model.model.norm
    plain = norm.forward
    norm.forward = lambda x: plain(x) + 0.1 * x.shape[1]
    assert "gives other logits" in refused(model)


def test_positions_that_are_counted_instead_of_taken_are_noticed():
    model = tiny_model()
    rotary = model.model.rotary_emb
    plain = rotary.forward
    rotary.forward = lambda x, position_ids: plain(x, torch.arange(x.shape[1])[None])
    assert "gives other logits" in refused(model)


@contextmanager
def attention_replaced(by: Callable[..., Any]):
    AttentionInterface.register("pilotfish", by)
    try:
        yield
    finally:
        AttentionInterface.register("pilotfish", huggingface._paged_attention)


def without_window(*args: Any, **kwargs: Any) -> Any:
    return huggingface._paged_attention(*args, **kwargs | {"sliding_window": None})


@pytest.mark.parametrize("window", [6, 100])
def test_a_model_that_does_not_tell_us_its_window_is_noticed(window: int):
    """Even one that is wider than the texts of the check are long."""
    model = tiny_model("mistral", sliding_window=window)
    HuggingFaceLM(model)
    with attention_replaced(without_window):
        assert "gives other logits" in refused(model)


def test_windows_are_as_wide_as_before():
    model = tiny_model("gemma2", sliding_window=40)
    HuggingFaceLM(model)
    assert model.config.sliding_window == 40
    assert [layer.self_attn.sliding_window for layer in model.model.layers] == [40, None, 40]
    with attention_replaced(without_window), pytest.raises(ModelError):
        HuggingFaceLM(model)
    assert model.config.sliding_window == 40
    assert [layer.self_attn.sliding_window for layer in model.model.layers] == [40, None, 40]


def test_a_check_that_is_switched_off_checks_nothing():
    with attention_replaced(without_window):
        HuggingFaceLM(tiny_model("mistral"), self_check=False)


# -- a model stays its owner's -----------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_the_model_generates_as_before(implementation: str):
    model = tiny_model(attn_implementation=implementation)
    before = generated(model)
    wrapped = HuggingFaceLM(model)
    wrapped.forward(*one_pass(wrapped))
    assert model.config._attn_implementation == implementation
    assert generated(model) == before
    assert len(set(before)) > 6, "else this text shows little"


def test_the_model_generates_as_before_though_a_pass_failed():
    model = tiny_model()
    before = generated(model)
    wrapped = HuggingFaceLM(model)

    def fail(*_args: object, **_kwargs: object) -> None:
        raise RuntimeError("out of memory")

    handle = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        wrapped.forward(*one_pass(wrapped))
    handle.remove()
    assert model.config._attn_implementation == "sdpa"
    assert generated(model) == before


def test_the_model_generates_as_before_though_it_was_refused():
    model = tiny_model("diffllama")
    before = generated(model)
    refused(model)
    assert generated(model) == before


# -- dtypes, shapes, facts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype_passes_the_check(dtype: torch.dtype, implementation: str):
    model = HuggingFaceLM(tiny_model(dtype=dtype, attn_implementation=implementation))
    assert model.info.dtype == dtype
    batch, cache = one_pass(model)
    assert cache.keys[0].dtype == dtype
    assert model.forward(batch, cache).logits_NV.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_check_finds_mistakes_in_coarse_dtypes_too(dtype: torch.dtype):
    with attention_replaced(without_window):
        assert "gives other logits" in refused(tiny_model("mistral", dtype=dtype))


def test_parts_in_different_dtypes_are_refused():
    model = tiny_model("opt")
    model.model.decoder.layers[1].self_attn.k_proj.register_forward_hook(lambda _module, _inputs, out: out.float())
    assert "one dtype" in refused(model)


def test_logits_are_those_of_the_wanted_rows():
    model = tiny_model()
    wrapped = HuggingFaceLM(model)
    every = wrapped.forward(*one_pass(wrapped, num_wanted=len(TEXT))).logits_NV
    for num_wanted in (0, 1, 3):
        logits_NV = wrapped.forward(*one_pass(wrapped, num_wanted=num_wanted)).logits_NV
        assert logits_NV.shape == (num_wanted, 64)
        torch.testing.assert_close(logits_NV, every[len(TEXT) - num_wanted :])


def test_models_that_give_the_logits_of_all_rows_are_understood():
    model = tiny_model()
    plain = model.forward
    model.forward = lambda *args, logits_to_keep=0, **kwargs: plain(*args, **kwargs)
    wrapped = HuggingFaceLM(model)
    every = wrapped.forward(*one_pass(wrapped, num_wanted=len(TEXT))).logits_NV
    torch.testing.assert_close(wrapped.forward(*one_pass(wrapped, num_wanted=2)).logits_NV, every[-2:])


@pytest.mark.parametrize(
    ("kind", "overrides", "shapes"),
    [
        ("llama", {}, [(2, 8, 8)] * 3),
        ("gpt2", {}, [(4, 8, 8)] * 3),
        ("gpt_bigcode", {"multi_query": True}, [(1, 8, 8)] * 3),
        ("deepseek_v3", {}, [(4, 12, 6)] * 3),
        ("gemma4_text", {}, [(2, 8, 8), (1, 16, 16)] * 2),
    ],
)
def test_shapes_are_measured(kind: str, overrides: dict[str, Any], shapes: list[tuple[int, int, int]]):
    assert HuggingFaceLM(tiny_model(kind, **overrides)).info.layers == tuple(LayerShape(*shape) for shape in shapes)


def test_facts():
    model = tiny_model()
    info = HuggingFaceLM(model, "a name").info
    assert (info.name, info.architecture, info.vocab_size, info.context) == ("a name", "LlamaForCausalLM", 64, 128)
    assert info.num_bytes == 8 * sum(weight.numel() for weight in model.parameters())
    assert info.hidden_size == 32 and info.device.type == "cpu" and info.dtype == torch.float64


@pytest.mark.parametrize(("eos", "expected"), [(None, set()), (5, {5}), ([5, 7], {5, 7})])
def test_end_of_text_ids(eos: Any, expected: set[int]):
    assert HuggingFaceLM(tiny_model(eos_token_id=eos)).info.eos_ids == expected


def test_generation_settings_know_better_when_a_text_ends():
    model = tiny_model(eos_token_id=5)
    model.generation_config.eos_token_id = [5, 9]
    assert HuggingFaceLM(model).info.eos_ids == {5, 9}


def test_a_text_may_not_outgrow_the_angles_it_began_with():
    """LongRoPE turns all keys anew once one text of the pass is longer than the original context."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
    model = tiny_model("phi3", rope_parameters=rope, original_max_position_embeddings=32)
    wrapped = HuggingFaceLM(model)
    assert wrapped.info.context == 32

    def last(length: int) -> torch.Tensor:
        """Logits of a short text behind those of one with this length, in the same pass."""
        cache = wrapped.new_cache(8)
        for name, tokens in (("long", [1] * length), ("short", TEXT)):
            cache.open(name, tokens)
            cache.reserve(name, len(tokens))
        feeds = [Feed("long", [1] * length, 0, 0), Feed("short", TEXT, 0, 1)]
        return wrapped.forward(lay_out(feeds, cache), cache).logits_NV

    torch.testing.assert_close(last(32), last(5))
    assert (last(33) - last(5)).abs().max() > 1e-3, "why the context must end there"


# -- layers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_taps_are_the_states_that_leave_a_layer(kind: str):
    model = tiny_model(kind)
    wrapped = HuggingFaceLM(model)
    hooks = [len(block._forward_hooks) for block in wrapped._blocks]
    tapped = wrapped.forward(*one_pass(wrapped), taps=(0, 1)).taps
    assert [len(block._forward_hooks) for block in wrapped._blocks] == hooks
    with torch.inference_mode():
        stock = model(torch.tensor([TEXT]), output_hidden_states=True, use_cache=False).hidden_states
    assert set(tapped) == {0, 1}
    for layer, states in tapped.items():
        torch.testing.assert_close(states, stock[layer + 1][0], rtol=1e-9, atol=1e-9)


def test_a_layer_that_does_not_exist_cannot_be_tapped():
    wrapped = HuggingFaceLM(tiny_model())
    with pytest.raises(ModelError, match="layer 3 .* 0 to 2"):
        wrapped.forward(*one_pass(wrapped), taps=(3,))


def test_some_layers_alone():
    """As if the others had been taken out of the model; what ran before and after is whole."""
    model, shorter = tiny_model(), tiny_model()
    wrapped = HuggingFaceLM(model)
    whole = wrapped.forward(*one_pass(wrapped)).logits_NV
    shorter.model.layers = nn.ModuleList([shorter.model.layers[0], shorter.model.layers[2]])
    shorter.config.num_hidden_layers = 2
    with torch.inference_mode():
        stock = shorter(torch.tensor([TEXT]), use_cache=False).logits[0, -1:]
    part = wrapped.forward(*one_pass(wrapped), layers=(0, 2)).logits_NV
    torch.testing.assert_close(part, stock, rtol=1e-9, atol=1e-9)
    assert (part - whole).abs().max() > 0.01
    torch.testing.assert_close(wrapped.forward(*one_pass(wrapped)).logits_NV, whole)
    with pytest.raises(ModelError, match="layer 3 "):
        wrapped.forward(*one_pass(wrapped), layers=(0, 3))


def test_a_model_in_training_is_run_without_dropout_and_stays_in_training():
    model = tiny_model("gpt2", attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5)
    wrapped = HuggingFaceLM(model)
    calm = wrapped.forward(*one_pass(wrapped)).logits_NV
    model.train()
    model.transformer.drop.eval()
    torch.testing.assert_close(wrapped.forward(*one_pass(wrapped)).logits_NV, calm)
    assert model.training and model.transformer.h[0].attn.training
    assert not model.transformer.drop.training


@pytest.mark.parametrize("context", [2, 3, 4, 5])
def test_very_short_contexts(context):
    assert HuggingFaceLM(tiny_model("gpt2", n_positions=context)).info.context == context
