"""The task of spoken words, and the training of its pair: numbers decide all, and a training that is ended goes on."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from pilotfish.errors import OptionError
from pilotfish.reproduce import spoken_pair
from pilotfish.reproduce.spoken import END, GAP, NUM_IDS, SOUND_IDS, Dictionary, num_errors, sounds_of, words_of
from pilotfish.reproduce.spoken_pair import Lesson, Schedule, error_rates, new_model, trained

TINY = {"d_model": 16, "d_kv": 8, "num_heads": 2, "d_ff": 16, "num_layers": 1, "num_decoder_layers": 1}
SCHEDULE = Schedule(num_steps=6, num_words=6, most_words=3, rate=1e-2, warmup=2)
WAYS = {"a": "AH0", "b": "B", "e": "EH1", "t": "T", "o": "OW2", "s": "S"}


@pytest.fixture(autouse=True)
def few_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spoken_pair, "_TEST_LINES", 4)


def words() -> Dictionary:
    """Made-up words that are spoken letter by letter, some in two ways, and some that cannot be written."""
    rng = random.Random(0)
    spelt = {"".join(rng.choices(list(WAYS), k=rng.randint(1, 5))) for _ in range(120)}
    entries = [(word, [[WAYS[c] for c in word], [WAYS[c] for c in word], ["Z", "Z"]]) for word in sorted(spelt)]
    return Dictionary([*entries, ("a.b.", [["B"]]), ("naïve", [["B"]])], num_held_out=20)


def test_words_are_told_apart_and_stress_is_dropped() -> None:
    found = words()
    train, held_out = {word for word, _ in found.train}, {word for word, _ in found.held_out}
    assert len(held_out) == 20
    assert not train & held_out
    assert not {"a.b.", "naïve"} & (train | held_out)
    assert all(ways == [[WAYS[c].rstrip("012") for c in word], ["Z", "Z"]] for word, ways in found.train)


def test_texts_say_what_they_are_made_of() -> None:
    found = words()
    lines = found.lines(3, 5, 2)
    for source, target in zip(lines.sources, lines.targets, strict=True):
        assert source[0] == GAP
        assert source[-1] == target[-1] == END
        assert max(*source, *target) < NUM_IDS
        for word, sounds in zip(words_of(source), sounds_of(target), strict=True):
            assert sounds in found.ways[word]
    assert found.lines(3, 5, 2) == lines
    assert found.lines(4, 5, 2) != lines
    held_out = {word for word, _ in found.held_out}
    assert {word for source in found.tests(9, 3).sources for word in words_of(source)} <= held_out


def test_a_text_ends_at_its_end_and_errors_are_counted_to_the_nearest_way() -> None:
    b, s = SOUND_IDS["B"], SOUND_IDS["S"]
    assert sounds_of([b, s, GAP, 5, b, END, s]) == [["B", "S"], ["B"]]
    assert num_errors(["B", "S"], [["B", "S", "T"], ["Z"]]) == (1, 3)
    assert num_errors([], [["B"], ["Z", "Z"]]) == (1, 1)
    assert num_errors(["B"], [["B"]]) == (0, 1)


def lesson(folder: Path, **more: Any) -> Lesson:
    return Lesson("target", new_model("target", TINY), words(), folder, SCHEDULE, **more)


def test_a_training_that_was_ended_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    lesson(tmp_path / "whole").run()
    begun = lesson(tmp_path / "parts")
    begun.run(stop_at=3)
    again = lesson(tmp_path / "parts")
    assert again.step == 3

    def interrupt(_lesson: Lesson) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        again.run(interrupt)
    last = lesson(tmp_path / "parts")
    assert last.step == 4
    last.run()
    models = [spoken_pair.load_model(tmp_path / name) for name in ("whole", "parts")]
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)
    untouched = new_model("target", TINY)
    assert not torch.equal(models[0].shared.weight, untouched.shared.weight), "something was learnt"


def test_a_checkpoint_of_another_training_is_refused(tmp_path: Path) -> None:
    lesson(tmp_path).run(stop_at=1)
    with pytest.raises(OptionError, match="another training"):
        Lesson("target", new_model("target", TINY), words(), tmp_path, Schedule(num_steps=9, num_words=6))


def test_a_draft_learns_its_teacher(tmp_path: Path) -> None:
    """A teacher that always says the same is learnt, not what the dictionary says."""
    teacher = new_model("target", TINY)
    with torch.no_grad():
        teacher.shared.weight.mul_(0.01)
        teacher.shared.weight[SOUND_IDS["ZH"]] = 1.0
    own = Lesson("draft", new_model("draft", TINY), words(), tmp_path, SCHEDULE, teacher)
    first = float(own._loss(words().lines(0, 4, 1)).detach())
    own.run(stop_at=5)
    assert float(own._loss(words().lines(0, 4, 1)).detach()) < first


def test_the_pair_is_trained_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spoken_pair, "_SIZES", {"target": TINY, "draft": TINY | {"d_model": 8}})
    monkeypatch.setattr(spoken_pair, "SCHEDULES", {"target": SCHEDULE, "draft": SCHEDULE})
    steps: list[str] = []
    loaded, notes = trained(tmp_path, lambda lesson: steps.append(lesson.role), words)
    assert steps == ["target"] * 6 + ["draft"] * 6
    assert loaded["target"].model.info.encoder_decoder
    assert set(notes["draft"]) == {"steps", "cpu_minutes", "parameters", "wrong_sounds", "wrong_words"}
    again, same = trained(tmp_path, lambda lesson: steps.append(lesson.role), words)
    assert len(steps) == 12
    assert same == notes
    assert again["draft"].model.info.hidden_size == 8


def test_the_real_sizes() -> None:
    sizes = {role: sum(p.numel() for p in new_model(role).parameters()) for role in ("target", "draft")}
    assert 9e6 < sizes["target"] < 11e6
    assert sizes["draft"] < 1e6


def test_an_untrained_model_is_wrong() -> None:
    """Negative control."""
    model = new_model("target", TINY)
    model.train(False)
    found = error_rates(model, words())
    assert found["wrong_words"] > 0.5
    assert found["wrong_sounds"] > 0
