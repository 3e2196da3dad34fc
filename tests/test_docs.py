"""Docs are kept true: files they name exist, code in them runs, commands in them are commands we have."""

import re
import shlex
import sys
import types
from pathlib import Path

import click
import pytest

from pilotfish.cli import main
from pilotfish.decoding.request import Request
from pilotfish.decoding.sampling import SamplingParams
from pilotfish.drafters.base import Drafter
from tests.models.test_speech import hearing_processor

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.S)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:pilotfish|tests|docs)/[\w/.]+)`", text)) - {"pilotfish/drafters/echo.py"}
    linked = {link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text) if "://" not in link}
    missing = [name for name in named if not (ROOT / name).exists()]
    missing += [link for link in linked if not (page.parent / link).exists()]
    assert not missing


def test_the_structure_page_names_every_folder() -> None:
    text = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
    folders = {path.parent.name for path in (ROOT / "pilotfish").glob("*/__init__.py")}
    assert {folder for folder in folders if f"`{folder}`" not in text} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_on_a_page_are_commands_we_have(page: Path) -> None:
    for block in blocks(page, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] != ["pilotfish"]:
                continue
            command = main.commands[words[1]]
            if isinstance(command, click.Group):
                command = command.commands[words[2]]
            flags = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
            unknown = [word.split("=")[0] for word in words[2:] if word.startswith("-") and len(word) > 1]
            assert set(unknown) <= flags | {"--help"}, line
            assert isinstance(command, click.Command)


def test_the_sound_on_the_page_is_heard(capsys: pytest.CaptureFixture[str]) -> None:
    (source,) = blocks(ROOT / "docs" / "encoder_decoder.md", "python")
    whisper, processor, wave = hearing_processor()
    exec(source, {"whisper": whisper, "distilled": whisper, "processor": processor, "wave": wave})
    assert capsys.readouterr().out.strip()


def test_the_drafter_on_the_page_works() -> None:
    (source,) = blocks(ROOT / "docs" / "drafters.md", "python")
    assert len(source.splitlines()) < 40
    module = types.ModuleType("echo")
    sys.modules["echo"] = module  # dataclasses look their module up
    try:
        exec(compile(source, "echo.py", "exec"), module.__dict__)
        drafter: Drafter = module.EchoDrafter(module.EchoOptions(period=2))
        request = Request("r", (1, 2, 3), SamplingParams(), 0, "rejection", 99)
        (draft,) = drafter.propose([request], [5])
    finally:
        del sys.modules["echo"]
    assert draft.tokens == (2, 3, 2, 3, 2)
    assert draft.probs is None
