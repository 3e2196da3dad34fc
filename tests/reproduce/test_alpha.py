"""alpha of models that are tables: what is tallied over the target's text equals what the tables say."""

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from pilotfish.decoding.draft import Draft, chain
from pilotfish.decoding.request import Request
from pilotfish.drafters.base import Drafter, Setting
from pilotfish.drafters.draft_model import DraftModelDrafter
from pilotfish.models.load import Loaded
from pilotfish.reproduce.alpha import LONGEST_RUN, Tally, tally
from tests.fakes import SourcedTable, TableModel

IDS = 5


def models() -> tuple[TableModel, TableModel]:
    """A target and a draft, both Markov chains of order 1."""
    return TableModel(IDS, order=1, seed=1), TableModel(IDS, order=1, seed=2)


def stationary(model: TableModel) -> Tensor:
    """How often each token comes in long texts."""
    step_VV = torch.stack([model.law([token]) for token in range(IDS)])
    return torch.linalg.matrix_power(step_VV, 200)[0]


def exact(target: TableModel, draft: TableModel, length: int) -> float:
    """The chance that a draft of so many tokens is accepted whole, by enumeration."""
    total = 0.0
    for path in itertools.product(range(IDS), repeat=length + 1):
        chance = float(stationary(target)[path[0]])
        for before, token in itertools.pairwise(path):
            chance *= min(float(target.law([before])[token]), float(draft.law([before])[token]))
        total += chance
    return total


def drafted_by(model: TableModel):
    return lambda setting: DraftModelDrafter(model, setting)


def measured(target: TableModel, draft: TableModel, temperature: float, num_texts: int = 40) -> Tally:
    prompts = [[i % IDS] for i in range(num_texts)]
    builders = {"draft": drafted_by(draft)}
    found, _ = tally(Loaded(target, None), builders, prompts, temperature=temperature, max_tokens=60, seed=7)
    return found["draft"]


def test_alpha_of_tables_is_what_enumeration_says() -> None:
    target, draft = models()
    found = measured(target, draft, 1.0)
    assert found.num_places > 2000
    assert found.alpha == pytest.approx(exact(target, draft, 1), abs=0.02)
    # Negative control: the draft's own text would give another mean.
    other = sum(float(stationary(draft)[t] * target.law([t]).minimum(draft.law([t])).sum()) for t in range(IDS))
    assert abs(other - exact(target, draft, 1)) > 0.04
    assert found.alpha != pytest.approx(other, abs=0.02)


def test_runs_of_acceptance_are_what_enumeration_says() -> None:
    target, draft = models()
    found = measured(target, draft, 1.0)
    expected = 1 + exact(target, draft, 1) + exact(target, draft, 2) + exact(target, draft, 3)
    assert found.expected_tokens(3) == pytest.approx(expected, rel=0.04)
    assert found.expected_tokens(LONGEST_RUN + 1) is None


def test_at_temperature_0_a_place_counts_where_both_agree() -> None:
    target, draft = models()
    found = measured(target, draft, 0.0, num_texts=1)
    text, agreed = [0], []
    for _ in range(60):
        text.append(int(target.law(text).argmax()))
        agreed.append(int(draft.law(text[:-1]).argmax()) == text[-1])
    assert found.num_places == 59  # all but the last
    assert found.alpha == pytest.approx(sum(agreed[:59]) / 59)


def test_the_text_is_the_targets_alone() -> None:
    target, draft = models()
    prompts = [[1], [2], [3]]
    texts = [
        tally(Loaded(target, None), builders, prompts, temperature=1.0, max_tokens=20, seed=3)[1]
        for builders in ({}, {"draft": drafted_by(draft)}, {"a": drafted_by(draft), "b": drafted_by(target)})
    ]
    assert texts[0] == texts[1] == texts[2]
    again = tally(Loaded(target, None), {}, prompts, temperature=1.0, max_tokens=20, seed=4)[1]
    assert again != texts[0]


def test_the_target_itself_is_always_right() -> None:
    target, _ = models()
    assert measured(target, target, 1.0, num_texts=3).alpha == pytest.approx(1)
    assert measured(target, target, 0.0, num_texts=3).alpha == 1


class Chosen(Drafter):
    """Always token 3, chosen."""

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Draft]:
        return [chain([3]) for _ in requests]


def test_a_chosen_token_counts_what_the_target_gives_it() -> None:
    target, _ = models()
    found, texts = tally(
        Loaded(target, None), {"three": lambda _setting: Chosen()}, [[1]], temperature=1.0, max_tokens=50, seed=1
    )
    ids = texts[0].ids
    expected = [float(target.law([before])[3]) for before in [1, *ids[:48]]]
    assert found["three"].alpha == pytest.approx(sum(expected) / len(expected))
    runs = found["three"].runs[0]
    assert runs == [float(sum(token == 3 for token in ids[:49])), 49]


class Broken(Drafter):
    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Draft]:
        raise RuntimeError("no")


def test_a_drafter_that_fails_leaves_no_silent_gap(caplog: pytest.LogCaptureFixture) -> None:
    target, _ = models()
    with pytest.raises(AssertionError, match="a drafter failed"):
        tally(Loaded(target, None), {"x": lambda _setting: Broken()}, [[1]], temperature=1.0, max_tokens=5, seed=1)
    assert "the drafter failed" in caplog.text


def test_encoder_decoders_are_tallied_by_source() -> None:
    target, draft = SourcedTable(IDS, order=1, seed=1), SourcedTable(IDS, order=1, seed=2)
    builders = {"itself": drafted_by(target), "draft": drafted_by(draft)}
    found, texts = tally(Loaded(target, None), builders, [[1, 2], [4]], temperature=0.0, max_tokens=12, seed=1)
    assert found["itself"].alpha == 1
    agreed = [
        int(draft.after(text.prompt, [0, *text.ids[:i]]).argmax()) == text.ids[i] for text in texts for i in range(11)
    ]
    assert found["draft"].alpha == pytest.approx(sum(agreed) / len(agreed))


def test_tallies_add_up() -> None:
    one, two = Tally(), Tally()
    for found, values in ((one, [0.5, 1.0]), (two, [0.0])):
        for value in values:
            found.note(value)
        found.note_text(values)
    one.merge(two)
    assert one.alpha == pytest.approx(0.5)
    assert one.runs[0] == [1.5, 3]
    assert one.runs[1] == [0.5, 1]
    assert one.expected_tokens(2) == pytest.approx(1 + 0.5 + 0.5)
    assert one.expected_tokens(3) is None
    assert math.isnan(Tally().alpha)


def test_setting_is_what_drafters_get() -> None:
    """A drafter that does not fit says so before anything runs."""

    def build(setting: Setting) -> Drafter:
        assert setting.target.name == "table"
        raise ValueError("does not fit")

    with pytest.raises(ValueError, match="does not fit"):
        tally(Loaded(models()[0], None), {"x": build}, [[1]], temperature=1.0, max_tokens=5, seed=1)
