"""Training: it learns, it goes on bit for bit, and no file is ever half written."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from pilotfish.errors import OptionError
from pilotfish.train import checkpoint
from pilotfish.train.collect import collect
from pilotfish.train.eagle3 import Eagle3Task, new_head
from pilotfish.train.lessons import Laws, pack, plan
from pilotfish.train.loop import Trainer, draft_vocabulary
from pilotfish.train.losses import Tally, judge
from pilotfish.train.medusa import MedusaTask, new_heads
from pilotfish.train.options import MedusaOptions
from pilotfish.train.states import Teacher
from pilotfish.train.store import Text, TextStore, split
from tests.train.tiny import options, target, texts

CPU = torch.device("cpu")


SHALLOW = {"num_hidden_layers": 1}  # the states then say more of what comes than in deeper random models


def eagle(own: list[Text], folder: Path, target_fields: dict[str, Any] | None = None, **values: Any) -> Trainer:
    opts, model = options(folder, **values), target(**(target_fields or {})).model
    table_VD = model.ends().embed(torch.arange(64))
    ids = draft_vocabulary(own, opts.draft_vocab_size, 64)
    head = new_head(model, opts, ids, lambda tokens_T: table_VD[tokens_T])
    folder.mkdir(parents=True, exist_ok=True)
    cache_bytes = int(opts.state_cache * 2**30)
    teacher = Teacher(model, head.config.taps, ids, folder=folder, cache_bytes=cache_bytes)
    parts = split(own, opts.holdout)
    return Trainer(opts, Eagle3Task(head, opts), teacher, parts.train, parts.held_out, folder,
                   identity=opts.identity())  # fmt: skip


def weights(trainer: Trainer) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in trainer.task.parameters]


def test_a_run_that_stops_goes_on_bit_for_bit(tmp_path: Path) -> None:
    own = texts(60)
    whole = eagle(own, tmp_path / "whole", epochs=3)
    start = weights(whole)
    whole.run()
    assert whole.status.step == whole.status.num_steps > 20
    for stop in (3, 11, 12):
        eagle(own, tmp_path / "parts", epochs=3).run(stop_at=stop)
    parts = eagle(own, tmp_path / "parts", epochs=3)
    assert parts.status.step == 12
    parts.run()
    assert parts.status.tokens == whole.status.tokens
    assert all(torch.equal(a, b) for a, b in zip(weights(whole), weights(parts), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(weights(whole), start, strict=True)), "everything learns"
    files = [tmp_path / name / "curves.jsonl" for name in ("whole", "parts")]
    steps = [
        [(entry["step"], entry["split"]) for entry in map(json.loads, file.read_text().splitlines())] for file in files
    ]
    assert steps[0] == steps[1]


def test_states_from_disk_are_the_states(tmp_path: Path) -> None:
    own = texts(30)
    with_cache, without = eagle(own, tmp_path / "a"), eagle(own, tmp_path / "b", state_cache=0)
    assert with_cache.teacher.cache is not None and without.teacher.cache is None
    with_cache.run()
    without.run()
    assert all(torch.equal(a, b) for a, b in zip(weights(with_cache), weights(without), strict=True))


_CHILD = """
import sys, time
sys.path.insert(0, {root!r})
from pathlib import Path
from tests.train.test_loop import eagle
from tests.train.tiny import texts
trainer = eagle(texts(60), Path({folder!r}), epochs=3, checkpoint_seconds=1e-9)
trainer.run(lambda status: (print(status.step, flush=True), time.sleep(0.02)))
"""


def test_a_kill_at_any_moment_ends_in_the_same_head(tmp_path: Path) -> None:
    code = _CHILD.format(root=str(Path(__file__).parents[2]), folder=str(tmp_path / "killed"))
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert child.stdout is not None
    for line in child.stdout:
        if int(line) == 9:
            break
    time.sleep(0.01)  # somewhere in a step, or in a checkpoint
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()
    own = texts(60)
    killed = eagle(own, tmp_path / "killed", epochs=3)
    assert 8 <= killed.status.step < killed.status.num_steps
    killed.run()
    whole = eagle(own, tmp_path / "whole", epochs=3)
    whole.run()
    assert all(torch.equal(a, b) for a, b in zip(weights(killed), weights(whole), strict=True))


def test_a_checkpoint_is_never_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, lines = texts(30), list[str]()
    trainer = eagle(own, tmp_path)
    trainer.say = lines.append
    trainer.run(stop_at=2)
    before = trainer.path.read_bytes()

    class Full:
        def __init__(self, file: Any):
            self.file = file

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def __enter__(self) -> "Full":
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def write(self, data: bytes) -> int:
            if self.file.tell() > 3000:
                raise OSError(errno.ENOSPC, "No space left on device")
            return int(self.file.write(data))

    opened = Path.open
    monkeypatch.setattr(Path, "open", lambda path, *a, **k: Full(opened(path, *a, **k)) if path.suffix == ".partial"
                        else opened(path, *a, **k))  # fmt: skip
    trainer.run(stop_at=4)
    monkeypatch.undo()
    assert trainer.path.read_bytes() == before
    assert not list(tmp_path.glob("*.partial"))
    assert "could not be written" in lines[0] and "the one before stays" in lines[0]
    assert eagle(own, tmp_path).status.step == 2


def test_a_checkpoint_of_another_run_is_refused_by_name(tmp_path: Path) -> None:
    own = texts(30)
    eagle(own, tmp_path).run(stop_at=1)
    with pytest.raises(OptionError, match="loss 'kl', not 'ce'"):
        eagle(own, tmp_path, loss="ce")
    (tmp_path / "checkpoint.pt").write_bytes(b"torn")
    with pytest.raises(OptionError, match="cannot be read"):
        eagle(own, tmp_path)
    assert checkpoint.load(tmp_path / "nothing", {}) is None


def collected(folder: Path, num_tokens: int) -> list[Text]:
    with TextStore(folder, {"vocab_size": 64}) as store:
        collect(options(num_tokens=num_tokens, collect_batch=16), target(**SHALLOW), store)
        return [text for text in store.texts if text.num_answer >= 3]


def test_both_heads_learn_to_guess_held_out_texts(tmp_path: Path) -> None:
    own = collected(tmp_path / "text", 6000)
    trainer = eagle(own, tmp_path / "eagle3", SHALLOW, epochs=6, batch_tokens=256, learning_rate=1e-2)
    before = trainer.test()
    trainer.run()
    after = trainer.status.held_out
    assert after.rows == before.rows and len(after.rows) == 3
    assert after.mean("loss")[0] < 0.9 * before.mean("loss")[0]
    chance = 1 / 64
    assert all(share > 0.15 > 9 * chance for share in after.mean("hits"))
    assert max(before.mean("hits")) < 4 * chance, "and that is what it learnt"
    assert after.mean("overlap")[0] > before.mean("overlap")[0] + 0.1

    model = target(**SHALLOW).model
    opts = MedusaOptions(
        out=str(tmp_path / "medusa"), batch_tokens=256, epochs=6, learning_rate=1e-2, holdout=0.1,
        draft_vocab_size=48, precision="float32",
    )  # fmt: skip
    ids = draft_vocabulary(own, 48, 64)
    heads = new_heads(model, opts, ids)
    (tmp_path / "medusa").mkdir()
    teacher = Teacher(model, (0,), ids, finish=model.ends().norm)
    parts = split(own, 0.1)
    other = Trainer(
        opts, MedusaTask(heads, opts), teacher, parts.train, parts.held_out, tmp_path / "medusa", identity={}
    )
    frozen = heads.lm_head.weight.clone()
    first = other.test()
    other.run()
    assert all(b < 0.9 * a for a, b in zip(first.mean("loss"), other.status.held_out.mean("loss"), strict=True))
    assert torch.equal(heads.lm_head.weight, frozen), "the target's matrix stays as it is"


def test_a_medusa_head_guesses_one_token_further_each() -> None:
    """Head k in the row of text place i is about token i + 2 + k."""
    model, own = target().model, texts(3)
    ids = list(range(64))
    opts = MedusaOptions(out="nowhere", num_heads=3)
    task = MedusaTask(new_heads(model, opts, ids), opts)
    teacher = Teacher(model, (2,), ids, finish=model.ends().norm)
    packed = pack(teacher.lessons(own), teacher.draft_of_V, CPU)
    for head, law_of_A in enumerate(task._pairs(packed)):
        for text, span in zip(own, packed.spans, strict=True):
            for row in range(span.stop - span.first):
                law = int(law_of_A[span.first_answer + row])
                place = text.num_prompt - 1 + row + 2 + head
                assert (law >= 0) == (place < len(text.ids))
                if law >= 0:
                    assert int(packed.laws.texts_N[law]) == text.ids[place]
    tally = task.test(packed, "kl")
    assert tally.rows == [float(sum(max(0, text.num_answer - 1 - head) for text in own)) for head in range(3)]


# -- pieces ----------------------------------------------------------------------------------------------------------


def laws(p: list[float], text: int) -> Laws:
    order = sorted(range(len(p)), key=lambda i: -p[i])
    return Laws(
        torch.tensor([order]), torch.tensor([[p[i] for i in order]]), torch.tensor([order[0]]), torch.tensor([text])
    )


def test_losses_are_what_they_say() -> None:
    p, q = [0.5, 0.3, 0.15], [0.2, 0.6, 0.2]  # the target has 0.05 elsewhere
    logits = torch.tensor([q]).log() + 3
    kl, hit, overlap = judge(logits, laws(p, 2), "kl")
    log = torch.tensor(q).log()
    assert float(kl) == pytest.approx(-sum(a / 0.95 * float(b) for a, b in zip(p, log, strict=True)), abs=1e-5)
    assert not bool(hit) and float(overlap) == pytest.approx(0.2 + 0.3 + 0.15)
    assert float(judge(logits, laws(p, 2), "ce")[0]) == pytest.approx(-float(log[2]), abs=1e-5)
    assert float(judge(logits, laws(p, -1), "ce")[0]) == 0
    assert float(judge(logits, laws(p, 2), "tv")[0]) == pytest.approx(0.35)
    share = 2.718281828 ** (-3 * 0.65)
    assert float(judge(logits, laws(p, 2), "hybrid")[0]) == pytest.approx(
        share * float(kl) + (1 - share) * 0.35, abs=1e-5
    )
    assert bool(judge(torch.tensor([p]).log(), laws(p, 0), "kl")[1])


def test_acceptance_length_multiplies_shares() -> None:
    tally = Tally()
    tally.add(0, 10, 5, 4.0, 1.0)
    tally.add(1, 10, 2, 1.0, 1.0)
    other = Tally()
    other.merge(tally)
    other.merge(tally)
    assert other.mean("hits") == [0.5, 0.2]
    assert other.acceptance_length == pytest.approx(1 + 0.5 + 0.5 * 0.2)


def test_an_epoch_meets_every_text_once() -> None:
    own = texts(50)
    first, second = plan(own, 100, 0, 0), plan(own, 100, 0, 1)
    for packs in (first, second):
        assert sorted(index for packed in packs for index in packed) == list(range(50))
        assert all(sum(len(own[i].ids) for i in packed) <= 100 for packed in packs)
    assert first != second
    assert first == plan(own, 100, 0, 0)


def test_the_draft_vocabulary_is_what_answers_have_most() -> None:
    own = [Text((9, 1, 1, 2, 2, 2, 7), 1), Text((8, 2, 1, 7), 1)]
    assert draft_vocabulary(own, 2, 64) == [1, 2]
    assert draft_vocabulary(own, 3, 64, always=[60]) == [1, 2, 60]
    assert draft_vocabulary(own, 5, 64) == [0, 1, 2, 3, 7]
    assert draft_vocabulary(own, 99, 64) == list(range(64))
