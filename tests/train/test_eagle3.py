"""Training-time test is drafting: each unrolled row is what the head gives when it drafts there step by step."""

import torch
from torch import Tensor

from pilotfish.heads.eagle3 import Eagle3Head
from pilotfish.train.eagle3 import Eagle3Task, new_head, unrolled
from pilotfish.train.lessons import Pack, pack
from pilotfish.train.losses import judge
from pilotfish.train.states import Lesson, Teacher
from tests.train.tiny import options, target, texts

IDS = sorted({*range(0, 64, 2), 1, 3, 5})


def setting(count: int = 5) -> tuple[Eagle3Head, Pack, list[Lesson], Teacher]:
    own = target().model
    table_VD = own.ends().embed(torch.arange(64))
    head = new_head(own, options(), list(IDS), lambda tokens_T: table_VD[tokens_T])
    teacher = Teacher(own, head.config.taps, IDS)
    lessons = teacher.lessons(texts(count))
    return head, pack(lessons, teacher.draft_of_V, torch.device("cpu")), lessons, teacher


def dense(keys: list[Tensor], values: list[Tensor]) -> object:
    """Attention of rows that see all keys so far, and each other causally."""

    def attend(q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
        keys.append(k_TGD)
        values.append(v_TGD)
        k, v = torch.cat(keys), torch.cat(values)
        k, v = (x.repeat_interleave(q_THD.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q_THD, k) * q_THD.shape[-1] ** -0.5
        places = torch.arange(len(k))
        seen = places[None, :] <= places[len(k) - len(q_THD) :, None]
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)

    return attend


def drafted(head: Eagle3Head, lesson: Lesson, place: int, num_steps: int) -> list[Tensor]:
    """What the head gives behind the states of rows 0..place, fed with the text's own tokens: as if they were its
    guesses."""
    ids, keys, values = torch.tensor(lesson.text.ids), list[Tensor](), list[Tensor]()
    attend = dense(keys, values)
    positions = torch.arange(place + 1)
    fused = head.fuse(lesson.states_MD[: place + 1].float())
    hidden = head(ids[1 : place + 2], fused, positions, attend)[-1:]
    outputs = [hidden[0]]
    for step in range(1, num_steps):
        hidden = head(ids[place + 1 + step][None], hidden, torch.tensor([place + step]), attend)
        outputs.append(hidden[0])
    return outputs


def test_an_unrolled_row_is_what_drafting_gives() -> None:
    head, packed, lessons, _ = setting()
    with torch.no_grad():
        steps = unrolled(head, packed, 3)
        checked = 0
        for lesson, span in zip(lessons, packed.spans, strict=True):
            for row in range(span.stop - span.first):
                place = lesson.text.num_prompt - 1 + row
                most = min(3, len(lesson.text.ids) - 2 - place)
                for step, hidden in enumerate(drafted(head, lesson, place, most)):
                    torch.testing.assert_close(steps[step][span.first_answer + row], hidden, rtol=2e-5, atol=2e-5)
                    checked += step > 0
    assert checked > 60


def test_texts_of_a_pack_do_not_see_each_other() -> None:
    head, packed, lessons, teacher = setting()
    with torch.no_grad():
        together = unrolled(head, packed, 3)
        for lesson, span in zip(lessons, packed.spans, strict=True):
            alone = unrolled(head, pack([lesson], teacher.draft_of_V, torch.device("cpu")), 3)
            rows = slice(span.first_answer, span.first_answer + span.stop - span.first)
            for whole, own in zip(together, alone, strict=True):
                torch.testing.assert_close(whole[rows], own, rtol=1e-5, atol=1e-5)


def test_a_wrong_mask_would_be_seen(monkeypatch: object) -> None:
    """Negative control: own keys of the step before left out."""
    head, packed, lessons, _ = setting(2)
    from pilotfish.train import eagle3 as module

    class Forgetful(module._Attention):
        def over_own(self, q_AHD: Tensor, k_AGD: Tensor, v_AGD: Tensor) -> Tensor:
            self.own.clear()
            return super().over_own(q_AHD, k_AGD, v_AGD)

    monkeypatch.setattr(module, "_Attention", Forgetful)  # type: ignore[attr-defined]
    with torch.no_grad():
        steps = unrolled(head, packed, 3)
        truth = drafted(head, lessons[0], lessons[0].text.num_prompt - 1, 3)
    torch.testing.assert_close(steps[1][0], truth[1], rtol=2e-5, atol=2e-5)
    assert float((steps[2][0] - truth[2]).abs().max()) > 1e-3


def test_each_guess_is_about_the_token_it_is_for() -> None:
    """Laws are the target's own, at the place the guess is for; checked against a plain forward."""
    own = target()
    _, packed, lessons, teacher = setting(3)
    for step in range(3):
        rows, laws = packed.pairs(step)
        for row, law in zip(rows.tolist(), laws.tolist(), strict=True):
            index = next(
                i for i, s in enumerate(packed.spans) if s.first_answer <= row < s.first_answer + s.stop - s.first
            )
            lesson, span = lessons[index], packed.spans[index]
            place = lesson.text.num_prompt - 1 + row - span.first_answer
            best = int(packed.laws.best_N[law])
            whole = teacher.lessons([lesson.text])[0]
            assert best == int(whole.best_N[law - span.first_law])
            token = lesson.text.ids[place + 2 + step]
            said = int(packed.laws.texts_N[law])
            assert said == (IDS.index(token) if token in IDS else -1)
    assert own.model.info.vocab_size == 64


def test_laws_are_the_targets_probabilities() -> None:
    own = target()
    _, _, lessons, _ = setting(3)
    from pilotfish.paged.batch import Feed, lay_out

    for lesson in lessons:
        ids = lesson.text.ids
        cache = own.model.new_cache(8, 16)
        cache.open("0", ids)
        cache.reserve("0", len(ids))
        logits_NV = own.model.forward(lay_out([Feed("0", ids, 0, len(ids))], cache), cache).logits_NV
        p_NV = logits_NV[lesson.text.num_prompt : -1].softmax(1)
        assert len(p_NV) == len(lesson.best_N)
        p_ND = p_NV[:, IDS]
        torch.testing.assert_close(p_ND.gather(1, lesson.ids_NK.long()), lesson.probs_NK.float(), atol=1e-3, rtol=1e-2)
        best = p_NV.argmax(1).tolist()
        assert lesson.best_N.tolist() == [IDS.index(token) if token in IDS else -1 for token in best]


def test_the_gradient_in_chunks_is_the_gradient(monkeypatch: object) -> None:
    from pilotfish.train import eagle3 as module

    head, packed, _, _ = setting()
    task = Eagle3Task(head, options())
    grads = []
    for size in (7, 10_000):
        monkeypatch.setattr(module, "_CHUNK", size)  # type: ignore[attr-defined]
        head.zero_grad()
        task.learn(packed, 3, "kl", 1.0)
        grads.append([parameter.grad.clone() for parameter in task.parameters if parameter.grad is not None])
    head.zero_grad()
    total, weights = torch.zeros(()), [1, 0.8, 0.64]
    for step, hidden in enumerate(unrolled(head, packed, 3)):
        rows, laws = packed.pairs(step)
        losses, _, _ = judge(head.logits(hidden[rows]), packed.laws.at(laws), "kl")
        total = total + losses.mean() * weights[step] / sum(weights)
    total.backward()
    grads.append([parameter.grad for parameter in task.parameters if parameter.grad is not None])
    assert len(grads[0]) == len(task.parameters)
    for first, second, third in zip(*grads, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(first, third, rtol=1e-4, atol=1e-6)
