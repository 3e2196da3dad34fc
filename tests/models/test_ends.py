"""The two ends of a model, as heads borrow them: with the last layer's states they make its logits."""

import pytest
import torch

from pilotfish.errors import ModelError
from pilotfish.models.decoder import Decoder
from pilotfish.models.huggingface import HuggingFaceLM
from pilotfish.models.linear import Packed, pack, pick_rows, unpack, unpack_rows
from pilotfish.models.products import GROUPED
from pilotfish.models.quantize import quantise
from pilotfish.models.quantized import QuantizedDecoder
from pilotfish.paged.batch import Feed, lay_out
from tests.models.tiny import tiny_model

TEXT = [3, 1, 4, 1, 5, 9, 2, 6]
MODELS = {
    "hf": lambda model: HuggingFaceLM(model, "tiny"),
    "native": lambda model: Decoder(model, "tiny"),
    "int8": lambda model: QuantizedDecoder(quantise(model, 8), "tiny"),
    "int4": lambda model: QuantizedDecoder(quantise(model, 4), "tiny"),
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text"])
@pytest.mark.parametrize("name", MODELS)
def test_they_turn_states_into_logits(name, kind, tied):
    model = tiny_model(kind, head_dim=32, tie_word_embeddings=tied, dtype=torch.float32)
    if tied:
        model.tie_weights()
    lm = MODELS[name](model)
    ends, last, error = lm.ends(), len(lm.info.layers) - 1, 0.03 if name.startswith("int") else 1e-4
    ids = torch.tensor([0, 5, 17, 63])
    table = model.get_input_embeddings().weight.detach()[ids]
    assert ends.embed(ids).dtype == torch.float32
    assert float((ends.embed(ids) - table).norm()) < error * float(table.norm()), "as stored, not as scaled"

    cache = lm.new_cache(4, 16)
    cache.open("text", TEXT)
    cache.reserve("text", len(TEXT))
    plain = lm.forward(lay_out([Feed("text", TEXT, 0, len(TEXT))], cache), cache)
    tapped = lm.forward(lay_out([Feed("text", TEXT, 0, len(TEXT))], cache), cache, taps=(0, last))
    assert torch.equal(plain.logits_NV, tapped.logits_NV), "to tap is to look on"
    logits_NV = ends.norm(tapped.taps[last]) @ ends.head_rows(torch.arange(lm.info.vocab_size)).T
    assert float((logits_NV - plain.logits_NV).norm()) < error * float(plain.logits_NV.norm())
    assert torch.equal(ends.head_rows(ids), ends.head_rows(torch.arange(64))[ids])


@pytest.mark.parametrize("bits", [8, GROUPED])
def test_some_rows_are_unpacked_and_picked_as_all_are(bits):
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(50, 40, generator=generator), torch.randn(50, generator=generator)
    packed, ids = pack(weight, bits, bias), torch.tensor([49, 0, 16, 15, 16])
    assert torch.equal(unpack_rows(packed.weights, packed.scales, ids, 40, bits), unpack(packed)[ids])
    parts = pick_rows(packed.weights, packed.scales, packed.bias, ids.tolist(), bits)
    assert torch.equal(unpack(Packed(bits, 40, 5, *parts)), unpack(packed)[ids])
    assert torch.equal(torch.from_numpy(parts[2])[:5], bias[ids])


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox", "gemma2"])
def test_other_families_have_ends_too(kind):
    ends = HuggingFaceLM(tiny_model(kind), "tiny").ends()
    assert ends.norm(torch.randn(2, 32)).shape == (2, 32) and ends.embed(torch.tensor([1])).shape == (1, 32)


def test_a_last_norm_that_is_not_known_is_said():
    with pytest.raises(ModelError, match="last norm"):
        HuggingFaceLM(tiny_model("opt"), "tiny").ends()
