"""Collecting survives kills, full disks and broken files, and covers many kinds of prompts."""

import errno
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pilotfish.errors import OptionError, PilotfishError
from pilotfish.models.load import load
from pilotfish.train.collect import Collected, collect, read_given
from pilotfish.train.prompts import Ask, Material, Prompt, Prompts, first_part, language_of, read_seeds, reads_well
from pilotfish.train.store import Text, TextStore
from tests.train.tiny import folder_model, options, target

ABOUT = {"vocab_size": 64}
ENGLISH = "The harbour was built in 1870, and the town with its ships is one of the oldest on the coast. " * 4
GERMAN = "Der Hafen ist alt und die Stadt mit dem Turm ist nicht weit von der Küste, das Meer ist eine Stunde weg. " * 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return folder_model(tmp_path_factory.mktemp("tiny"))


def test_it_collects_what_was_asked_for_and_no_text_twice(tmp_path: Path) -> None:
    with TextStore(tmp_path, ABOUT) as store:
        done = collect(options(), target(), store)
        assert 600 <= store.num_tokens < 600 + 8 * 64
        assert done.num_tokens == store.num_tokens
        assert len({text.ids for text in store.texts}) == len(store.texts)
        assert {text.temperature for text in store.texts} == {0.0, 1.0}
        assert all(len(text.ids) <= 64 for text in store.texts)


def test_a_later_start_goes_on_behind_the_last_number(tmp_path: Path) -> None:
    with TextStore(tmp_path, ABOUT) as store:
        collect(options(), target(), store)
        before, number = list(store.texts), store.next_number
    with TextStore(tmp_path, ABOUT) as store:
        collect(options(num_tokens=900), target(), store)
        assert store.texts[: len(before)] == before
        assert all(text.number >= number for text in store.texts[len(before) :])
        assert store.num_tokens >= 900


_CHILD = """
import sys
sys.path.insert(0, {root!r})
from pilotfish.train.collect import collect
from pilotfish.train.store import TextStore
from tests.train.tiny import options, target
with TextStore({folder!r}, {about!r}) as store:
    print("ready", flush=True)
    collect(options(num_tokens=10**9), target(), store)
"""


def test_a_kill_at_any_moment_loses_nothing_that_was_finished(tmp_path: Path) -> None:
    code = _CHILD.format(root=str(Path(__file__).parents[2]), folder=str(tmp_path), about=ABOUT)
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    path, deadline = tmp_path / "00000.text", time.monotonic() + 60
    while not (path.exists() and path.stat().st_size > 2000):
        assert child.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    size = path.stat().st_size
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()
    with TextStore(tmp_path, ABOUT) as store:
        kept = list(store.texts)
        assert sum(len(text.pack()) + 8 for text in kept) >= size - store.found.torn_bytes
        assert len(kept) > 3
        collect(options(num_tokens=store.num_tokens + 100), target(), store)
        assert store.texts[: len(kept)] == kept


def test_a_full_disk_stops_with_a_way_out_and_what_was_collected_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, budget = os.write, [1500]

    def limited(file: int, data: bytes) -> int:
        budget[0] -= len(data)
        if budget[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data)

    with TextStore(tmp_path, ABOUT) as store:
        monkeypatch.setattr(os, "write", limited)
        with pytest.raises(PilotfishError, match="No space left on device"):
            collect(options(num_tokens=10**6), target(), store)
        kept = list(store.texts)
    monkeypatch.undo()
    with TextStore(tmp_path, ABOUT) as store:
        assert store.texts == kept != []


def test_broken_lines_are_skipped_counted_and_named(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": [1, 2]}\n{"prompt": [1,\n\n{"other": 1}\n{"prompt": [3, 4], "category": "numbers"}\n')
    done, lines = Collected(), list[str]()
    given = read_given(str(path), done, lines.append)
    assert [prompt.content for prompt in given] == [(1, 2), (3, 4)]
    assert done.skipped_lines == [2, 4]
    assert "line 2 is not JSON" in lines[0] and lines[0].endswith("skipped")
    assert "2 of 5 lines skipped" in lines[-1]
    with TextStore(tmp_path / "text", ABOUT) as store:
        collect(options(prompts=str(path)), target(), store)
        assert {text.ids[:2] for text in store.texts} == {(1, 2), (3, 4)}
        assert "numbers" in {text.kind for text in store.texts}


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    with pytest.raises(OptionError, match="cannot be read"):
        read_given(str(path), Collected(), lambda _line: None)
    path.write_text("nothing\n")
    with pytest.raises(OptionError, match="no usable prompts"):
        read_given(str(path), Collected(), lambda _line: None)
    with pytest.raises(OptionError, match="no readable text"):
        read_seeds(str(tmp_path))
    with pytest.raises(OptionError, match="there is no folder"):
        read_seeds(str(tmp_path / "nowhere"))


def test_prompts_that_give_nothing_new_end_the_collecting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pilotfish.train import collect as module

    monkeypatch.setattr(module, "_STALLED", 20)
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": {[1] * 60}}}\n')  # no room for an answer
    lines: list[str] = []
    with TextStore(tmp_path / "text", ABOUT) as store:
        collect(options(prompts=str(path)), target(), store, say=lines.append)
        assert store.num_tokens == 0
    assert "no new texts" in lines[-1]


# -- what prompts are made of ----------------------------------------------------------------------------------------


def finish(prompts: Prompts, number: int) -> Prompt | None:
    """A recipe to its end; the target writes the same words every time."""
    recipe, _ = prompts.recipe(number)
    wrote: str | None = None
    try:
        while True:
            ask = recipe.send(wrote) if wrote is not None else next(recipe)
            assert isinstance(ask, Ask) and ask.ids
            wrote = " the oldest harbour of that town?\n\nMore."
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


def test_recipes_cover_what_people_ask_and_depend_on_their_number_alone(model: str) -> None:
    loaded = load(model)
    material = Material(
        seeds={"en": [ENGLISH, ENGLISH + ENGLISH], "de": [GERMAN]},
    )
    material.keep("question", "What is a harbour, and where is it?", "A place for ships, between the land and the sea.")
    assert loaded.tokenizer is not None
    prompts = Prompts(loaded.tokenizer, 256, 4000, 0, material)
    made = [finish(prompts, number) for number in range(400)]
    kinds = {prompt.kind for prompt in made if prompt}
    assert kinds == {"question", "fact", "task", "code", "science", "free", "maths", "passage", "summary", "edit",
                     "translate", "reading", "retrieval", "long", "follow_up"}  # fmt: skip
    assert made == [finish(prompts, number) for number in range(400)]
    assert len({tuple(prompt.ids) for prompt in made if prompt}) > 250
    texts = [loaded.tokenizer.decode(prompt.ids) for prompt in made if prompt]
    assert all(text.startswith("[user]") and text.endswith("[a]") for text in texts)
    assert not any("\u2603" in text or "{text}" in text for text in texts)
    assert max(len(prompt.ids) for prompt in made if prompt) > 2000, "some are long"
    other = Prompts(loaded.tokenizer, 256, 4000, 1, material)
    assert [finish(other, number) for number in range(20)] != made[:20]


def test_no_recipe_needs_passages_that_are_not_there(model: str) -> None:
    loaded = load(model)
    prompts = Prompts(loaded.tokenizer, 256, 1000, 0, Material())
    made = [finish(prompts, number) for number in range(200)]
    assert not {"summary", "edit", "reading", "retrieval", "long"} & {prompt.kind for prompt in made if prompt}


def test_a_chat_model_collects_through_its_own_chat_format(model: str, tmp_path: Path) -> None:
    loaded = load(model)
    assert loaded.tokenizer is not None
    with TextStore(tmp_path, {"vocab_size": 256}) as store:
        done = collect(options(max_length=128, num_tokens=300), loaded, store)
        texts = [loaded.tokenizer.decode(text.ids) for text in store.texts]
    assert all(text.startswith("[user]") and "[a]" in text for text in texts)
    assert done.num_written > 0


def test_texts_are_told_apart() -> None:
    assert language_of(ENGLISH) == "en" and language_of(GERMAN) == "de"
    assert language_of("xyz 123 qqq") is None
    assert reads_well("A sentence, then a second one of another sort; and some more to come.")
    assert not reads_well("the game's creator, " * 20) and not reads_well("")
    assert first_part("one\ntwo\n\nthree") == "one\ntwo"


def test_only_passages_that_say_something_are_kept() -> None:
    material, rng = Material(), random.Random(0)
    material.keep("passage", "", "the game and the creator of the game " * 30)
    material.keep("question", "", ENGLISH)
    assert material.passage(rng) is None
    article = (
        "The tower of the old castle was struck by lightning and burned for two days. Nobody was hurt, for the guards "
        "had left with the last of the visitors an hour before. Today a museum shows what is left of it, and of the "
        "furniture that people carried out of the windows."
    )
    material.keep("passage", "", article)
    assert material.passage(rng) == article


def test_seeds_are_paragraphs_by_language(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(
        f"Title\n\n{ENGLISH}\n\n1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23\n\n"
    )
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.txt").write_text(GERMAN)
    (tmp_path / "c.txt").write_bytes(b"\xff\xfe\x00binary")
    (tmp_path / "d.bin").write_text(ENGLISH)
    found, skipped = read_seeds(str(tmp_path))
    assert found == {"en": [ENGLISH.strip()], "de": [GERMAN.strip()]}
    assert skipped == 1


def test_the_store_remembers_what_kind_a_text_is(tmp_path: Path) -> None:
    text = Text((1, 2, 3, 4, 5), 2, "passage", 7, 1.0, False)
    with TextStore(tmp_path, ABOUT) as store:
        store.append(text)
    with TextStore(tmp_path, ABOUT) as store:
        assert store.texts == [text]
