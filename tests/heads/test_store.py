"""Heads on disk: what is saved comes back, in a format that others read, for its own target only."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from pilotfish.errors import DraftError
from pilotfish.heads.eagle3 import Eagle3Config, Eagle3Head, default_taps
from pilotfish.heads.layers import packed
from pilotfish.heads.medusa import MedusaConfig, MedusaHeads
from pilotfish.heads.store import SHIPPED, kind_of, load_for, load_head, read_config, save_head
from pilotfish.models.load import Loaded, from_objects
from tests.fakes import ByteTokenizer
from tests.models.tiny import VOCAB_SIZE, tiny_model

IDS = [2, 3, 5, 8, 13, 21, 34, 55]
TARGET = from_objects(tiny_model(name_or_path="tiny"))
ENDS = TARGET.model.ends()


def eagle3(**more) -> Eagle3Head:
    sizes = {"hidden_size": 32, "intermediate_size": 24, "num_heads": 4, "num_key_heads": 2, "head_dim": 8}
    ids = more.pop("ids", IDS)
    count = VOCAB_SIZE if ids is None else len(ids)
    config = Eagle3Config(**sizes, vocab_size=VOCAB_SIZE, draft_vocab_size=count, taps=(0, 1, 2), **more)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        head = Eagle3Head(config, ENDS.embed, ids)
        for weight in head.parameters():
            weight.data.normal_(0, 0.3)
    return head


def medusa(ids=IDS) -> MedusaHeads:
    count = VOCAB_SIZE if ids is None else len(ids)
    rows = ENDS.head_rows(torch.arange(VOCAB_SIZE) if ids is None else torch.tensor(ids))
    heads = MedusaHeads(MedusaConfig(hidden_size=32, vocab_size=VOCAB_SIZE, draft_vocab_size=count), rows, ids)
    generator = torch.Generator().manual_seed(4)
    heads.blocks.weight.data.normal_(0, 0.1, generator=generator)
    heads.blocks.bias.data.normal_(0, 0.1, generator=generator)
    return heads


def outputs(head) -> torch.Tensor:
    """Of a few rows, whole text at once."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        if isinstance(head, MedusaHeads):
            return head(torch.randn(6, 32, generator=generator))
        hidden = head.fuse(torch.randn(6, 96, generator=generator))
        tokens = torch.randint(VOCAB_SIZE, (6,), generator=generator)
        return head.logits(head(tokens, hidden, torch.arange(6), causal))


def causal(q_THD, k_TGD, v_TGD):
    q, k, v = (x.transpose(0, 1)[None] for x in (q_THD, k_TGD, v_TGD))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1)


VARIANTS = {
    "plain": {},
    "all ids": {"ids": None},
    "EAGLE-3.1": {"fc_norm": True, "norm_output": True},
    "gpt-oss": {"norm_before_fc": True, "norm_before_residual": True},
    "qwen3": {"qk_norm": True},
    "llama 3 rotations": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
}


@pytest.mark.parametrize("name", VARIANTS)
def test_an_eagle3_head_comes_back(name, tmp_path):
    head = eagle3(**VARIANTS[name])
    again = load_head(save_head(head, tmp_path / "head", TARGET), TARGET)
    assert again.config == head.config
    assert torch.equal(again.target_ids(), head.target_ids())
    assert torch.allclose(outputs(again), outputs(head), atol=0.02, rtol=0.01)  # float16


@pytest.mark.parametrize("ids", [IDS, None])
def test_medusa_heads_come_back(ids, tmp_path):
    heads = medusa(ids)
    again = load_head(save_head(heads, tmp_path / "head", TARGET), TARGET)
    assert again.config == heads.config and torch.equal(again.target_ids(), heads.target_ids())
    assert torch.allclose(outputs(again), outputs(heads), atol=0.01, rtol=0.01)


def test_untrained_medusa_heads_say_what_the_target_says():
    heads = MedusaHeads(
        MedusaConfig(hidden_size=32, vocab_size=64, draft_vocab_size=64), ENDS.head_rows(torch.arange(64))
    )
    states = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for logits in heads(states):
            assert torch.allclose(logits, states @ ENDS.head_rows(torch.arange(64)).T, atol=1e-5)


def test_only_what_is_the_head_s_own_is_stored(tmp_path):
    names = load_file(save_head(eagle3(), tmp_path / "eagle3", TARGET) / "model.safetensors")
    assert not any("embed" in name for name in names) and {"d2t", "t2d"} < set(names)
    assert names["lm_head.weight"].dtype == torch.float16
    names = load_file(save_head(medusa(), tmp_path / "medusa", TARGET) / "model.safetensors")
    assert not any("lm_head" in name for name in names)


def test_an_embedding_of_its_own_is_kept(tmp_path):
    folder = save_head(eagle3(), tmp_path / "head", TARGET)
    tensors = load_file(folder / "model.safetensors")
    for table, own in ((ENDS.embed(torch.arange(64)) * 1.001, False), (torch.randn(64, 32), True)):
        save_file(tensors | {"embed_tokens.weight": table.half().contiguous()}, folder / "model.safetensors")
        head = load_head(folder, TARGET)
        assert isinstance(head.embed, torch.nn.Module) == own
    assert "embed_tokens.weight" in load_file(save_head(head, tmp_path / "again", TARGET) / "model.safetensors")
    for shape in ((40, 32), (65, 32), (0, 32), (64, 16)):  # too short, and some drawn ids would fail
        save_file(tensors | {"embed_tokens.weight": torch.zeros(shape).half()}, folder / "model.safetensors")
        with pytest.raises(DraftError, match="embed_tokens.weight is"):
            load_head(folder, TARGET)


def test_draft_ids_in_any_order_are_put_in_theirs(tmp_path):
    folder = save_head(eagle3(), tmp_path / "head", TARGET)
    tensors, order = load_file(folder / "model.safetensors"), torch.tensor([3, 0, 7, 1, 2, 6, 5, 4])
    tensors["d2t"] = torch.tensor(IDS)[order] - torch.arange(8)
    tensors["lm_head.weight"] = tensors["lm_head.weight"][order]
    save_file(tensors, folder / "model.safetensors")
    again = load_head(folder, TARGET)
    assert again.target_ids().tolist() == IDS
    assert torch.allclose(outputs(again), outputs(eagle3()), atol=0.02, rtol=0.01)


def test_packed_into_bytes_it_says_nearly_the_same():
    for head in (eagle3(), medusa()):
        before = outputs(head)
        packed(head, 8)
        assert not torch.equal(outputs(head), before)
        assert float((outputs(head) - before).norm()) < 0.03 * float(before.norm())


# -- the format of `speculators` -------------------------------------------------------------------------------------


def test_the_config_is_what_speculators_writes(tmp_path):
    folder = save_head(eagle3(), tmp_path / "head", TARGET, notes={"steps": 3})
    config = json.loads((folder / "config.json").read_text())
    assert config["speculators_model_type"] == "eagle3" and config["draft_vocab_size"] == 8
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3], "layers are counted by their inputs there"
    assert config["speculators_config"]["verifier"] == {"name_or_path": "tiny", "architectures": ["LlamaForCausalLM"]}
    layer = config["transformer_layer_config"]
    assert (layer["model_type"], layer["num_hidden_layers"], layer["vocab_size"]) == ("llama", 1, VOCAB_SIZE)
    assert config["pilotfish"]["notes"] == {"steps": 3}
    shapes = {name: tuple(t.shape) for name, t in load_file(folder / "model.safetensors").items()}
    assert shapes["layers.0.self_attn.q_proj.weight"] == (32, 64)
    assert shapes["layers.0.self_attn.k_proj.weight"] == shapes["layers.0.self_attn.v_proj.weight"] == (16, 64)
    assert shapes["layers.0.mlp.gate_proj.weight"] == (24, 32) and shapes["fc.weight"] == (32, 96)
    assert shapes["d2t"] == (8,) and shapes["t2d"] == (64,)


def test_a_head_as_speculators_writes_it_is_read(tmp_path):
    """Made up by hand, without anything of ours in it: other spellings of the config, nothing that has a default."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    layer = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 24, "num_attention_heads": 4}
    layer |= {"num_key_value_heads": 2, "vocab_size": 64, "rms_norm_eps": 1e-6, "rope_theta": 5e5, "rope_scaling": None}
    config = {"speculators_model_type": "eagle3", "draft_vocab_size": 8, "transformer_layer_config": layer}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(save_head(eagle3(), tmp_path / "ours", TARGET) / "model.safetensors")
    save_file(
        {name: t.bfloat16() if t.is_floating_point() else t for name, t in tensors.items()},
        folder / "model.safetensors",
    )
    head = load_head(folder, TARGET)
    assert head.config.taps == default_taps(3) and head.config.rope_theta == 5e5 and head.config.norm_epsilon == 1e-6
    assert head.fc.weight.dtype == torch.float32 and head.target_ids().tolist() == IDS


def test_speculators_reads_it_and_computes_the_same(tmp_path):
    """In a process of its own: that package warns, and this suite counts warnings as errors."""
    pytest.importorskip("speculators")
    model = tiny_model(dtype=torch.float32)
    model.save_pretrained(tmp_path / "target")
    target = from_objects(model, name=str(tmp_path / "target"))
    head = eagle3()
    head.embed = target.model.ends().embed
    folder = save_head(head, tmp_path / "head", target)
    generator = torch.Generator().manual_seed(1)
    taps, tokens = torch.randn(7, 96, generator=generator), torch.randint(VOCAB_SIZE, (7,), generator=generator)
    torch.save({"taps": taps, "tokens": tokens}, tmp_path / "input.pt")
    subprocess.run([sys.executable, "-c", _THEIRS, str(folder), str(tmp_path)], check=True)
    again = load_head(folder, target)
    with torch.no_grad():
        ours = again.logits(again(tokens, again.fuse(taps), torch.arange(7), causal))
    assert torch.allclose(ours, torch.load(tmp_path / "output.pt"), atol=1e-4)
    back = load_head(tmp_path / "theirs", target)
    assert back.config == again.config and torch.allclose(outputs(back), outputs(again), atol=0.02)


_THEIRS = """
import sys, torch
from speculators.models.eagle3 import Eagle3DraftModel
folder, place = sys.argv[1:]
model = Eagle3DraftModel.from_pretrained(folder, attn_implementation="eager").float()
data, seen = torch.load(place + "/input.pt"), []
model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output[0]))
with torch.no_grad():
    model(data["taps"][None], data["tokens"][None], torch.zeros(1, 7, dtype=torch.long), ttt_steps=1)
torch.save(seen[0], place + "/output.pt")
model.save_pretrained(place + "/theirs")
"""


# -- refusals --------------------------------------------------------------------------------------------------------


def test_another_target_is_refused_by_name(tmp_path):
    folder = save_head(eagle3(), tmp_path / "head", TARGET)
    others = {
        "hidden size of 48": tiny_model(hidden_size=48, name_or_path="other"),
        "2 layers": tiny_model(num_hidden_layers=2, name_or_path="other"),
        "vocabulary of 32": tiny_model(vocab_size=32, name_or_path="other"),
    }
    for words, other in others.items():
        with pytest.raises(DraftError, match=f"trained for tiny.*target other has.*{words}"):
            load_head(folder, from_objects(other))


def test_another_vocabulary_is_refused_and_none_fits_any(tmp_path):
    first, second = ByteTokenizer(64, 60), ByteTokenizer(64, 61)
    folder = save_head(eagle3(), tmp_path / "head", Loaded(TARGET.model, first))
    load_head(folder, Loaded(TARGET.model, first))
    load_head(folder, TARGET)
    with pytest.raises(DraftError, match="checksum"):
        load_head(folder, Loaded(TARGET.model, second))


def test_files_that_are_missing_or_damaged_are_named(tmp_path):
    def fresh(name):
        return save_head(eagle3(), tmp_path / name, TARGET)

    with pytest.raises(DraftError, match="no folder .*nowhere"):
        load_head(tmp_path / "nowhere", TARGET)
    (fresh("a") / "model.safetensors").unlink()
    with pytest.raises(DraftError, match="a/model.safetensors"):
        load_head(tmp_path / "a", TARGET)
    whole = (fresh("b") / "model.safetensors").read_bytes()
    for size in (0, 5, 100, len(whole) - 1):
        (tmp_path / "b" / "model.safetensors").write_bytes(whole[:size])
        with pytest.raises(DraftError, match="b/model.safetensors is damaged"):
            load_head(tmp_path / "b", TARGET)
    (fresh("c") / "config.json").write_text("{")
    with pytest.raises(DraftError, match="c/config.json is not JSON"):
        load_head(tmp_path / "c", TARGET)
    (fresh("d") / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(DraftError, match="d/config.json is not the config of an EAGLE-3 head"):
        load_head(tmp_path / "d", TARGET)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"draft_vocab_size": 9}, "d2t"),
        ({"draft_vocab_size": "many"}, "does not describe a head"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, "eagle_aux_hidden_state_layer_ids"),
        ({"transformer_layer_config": {"model_type": "gemma3_text"}}, "gemma3_text|does not describe"),
        ({"norm_before_fc": True}, "input_norm"),
    ],
)
def test_configs_that_do_not_fit_their_tensors_are_refused(change, words, tmp_path):
    folder = save_head(eagle3(), tmp_path / "head", TARGET)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(DraftError, match=words):
        load_head(folder, TARGET)


def test_a_folder_with_something_else_in_it_is_not_overwritten(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "me.png").touch()
    with pytest.raises(DraftError, match="photos holds something else"):
        save_head(eagle3(), tmp_path / "photos", TARGET)
    assert (tmp_path / "photos" / "me.png").exists()


def test_a_failed_save_leaves_the_old_head_and_nothing_else(tmp_path):
    folder = save_head(eagle3(), tmp_path / "head", TARGET)
    before = (folder / "model.safetensors").read_bytes()
    broken = eagle3()
    broken.fc.weight.data[0, 0] = 1e9
    with pytest.raises(DraftError, match="fc.weight.*diverged"):
        save_head(broken, folder, TARGET)
    with pytest.raises(TypeError):
        save_head(eagle3(), folder, TARGET, notes={"what": object()})
    assert (folder / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["head"]
    save_head(medusa(), folder, TARGET)  # and a good one takes its place
    assert isinstance(load_head(folder, TARGET), MedusaHeads)


def test_a_head_in_memory_is_copied():
    head = eagle3()
    copied = load_for(head, TARGET.model, None, "eagle3")
    packed(copied, 8)
    assert isinstance(head.fc, torch.nn.Linear) and not isinstance(copied.fc, torch.nn.Linear)
    with pytest.raises(DraftError, match="not as 7"):
        load_for(7, TARGET.model, None, "eagle3")


def test_a_head_that_comes_along_is_taken_for_its_own_target_only(tmp_path, monkeypatch):
    monkeypatch.setattr("pilotfish.heads.store.SHIPPED", tmp_path)
    named = Loaded(TARGET.model, ByteTokenizer())
    with pytest.raises(DraftError, match="pilotfish train eagle3"):
        load_for(None, named.model, named.tokenizer, "eagle3")
    save_head(eagle3(), tmp_path / "eagle3", named)
    assert isinstance(load_for(None, named.model, named.tokenizer, "eagle3"), Eagle3Head)
    assert isinstance(load_for(None, named.model, None, "eagle3"), Eagle3Head)  # its sizes are told apart
    other = from_objects(tiny_model(num_hidden_layers=5), None)
    with pytest.raises(DraftError, match="needs a trained head"):
        load_for(None, other.model, named.tokenizer, "eagle3")
    with pytest.raises(DraftError, match="needs a trained head"):
        load_for(None, named.model, named.tokenizer, "medusa")


def test_the_heads_that_come_along_are_whole_small_and_named_after_their_methods():
    sizes = []
    for method in ("eagle3", "medusa"):
        folder = SHIPPED / method
        config, weights = read_config(folder), load_file(str(folder / "model.safetensors"))
        assert kind_of(config) == method and config["pilotfish"]["target"]["num_layers"] == 30
        assert all(bool(tensor.isfinite().all()) for tensor in weights.values() if tensor.is_floating_point())
        assert not any(tensor.dtype == torch.float32 for tensor in weights.values())
        sizes.append((folder / "model.safetensors").stat().st_size)
    assert sum(sizes) < 45e6
