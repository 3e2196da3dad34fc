"""What a prompt file may say, and how a broken one is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from pilotfish.bench.prompts import UNNAMED, BenchPrompt, read_prompts, spread
from pilotfish.errors import OptionError, PromptError
from pilotfish.models.tokenizer import Tokenizer


class WordTokenizer(Tokenizer):
    """Ids are lengths of words; a template puts 100 before a chat."""

    def __init__(self, template: str | None):
        self.hf: Any = type("Template", (), {"chat_template": template})

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [len(word) for word in text.split()]

    def chat(self, messages: Any) -> list[int]:
        return [100, *(n for message in messages for n in self.encode(message["content"]))]


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_turns_and_prompts_and_ids_are_read(tmp_path: Path) -> None:
    path = write(
        tmp_path / "prompts.jsonl",
        '{"question_id": 1, "category": "qa", "turns": ["first", "second"]}',
        "",
        '{"prompt": "raw text"}',
        '{"prompt": ["one", "two"], "category": "qa"}',
        '{"prompt": [5, 6, 7], "category": "ids"}',
    )
    assert read_prompts(path) == [
        BenchPrompt("line 1", "qa", "first", chat=True),
        BenchPrompt("line 3", UNNAMED, "raw text"),
        BenchPrompt("line 5", "ids", (5, 6, 7)),
        BenchPrompt("line 4", "qa", "one"),
    ]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"prompt": "a"', "not JSON"),
        ('["a"]', "a JSON object is wanted, not list"),
        ('{"text": "a"}', "one of 'turns' and 'prompt' is wanted; the keys are text"),
        ('{"turns": ["a"], "prompt": "a"}', "one of 'turns' and 'prompt'"),
        ('{"turns": "a"}', "'turns' must be a list"),
        ('{"turns": []}', "'turns' must be a list"),
        ('{"turns": [1, 2]}', "'turns' must be a list of texts"),
        ('{"prompt": ""}', "'prompt' must be"),
        ('{"prompt": [1, "a"]}', "'prompt' must be"),
        ('{"prompt": [true]}', "'prompt' must be"),
        ('{"prompt": "a", "category": 3}', "category must be a name"),
        ('{"prompt": "a", "category": "all"}', "category must be a name other than 'all'"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, said: str) -> None:
    path = write(tmp_path / "prompts.jsonl", '{"prompt": "fine"}', "", line, '{"prompt": "fine"}')
    with pytest.raises(PromptError, match="prompts.jsonl, line 3") as caught:
        read_prompts(path)
    assert said in str(caught.value)


def test_bytes_that_are_not_text_are_named(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'{"prompt": "fine"}\n{"prompt": "\xff"}\n')
    with pytest.raises(PromptError, match="line 2 is not JSON"):
        read_prompts(path)


def test_a_line_may_hold_odd_line_breaks(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(json.dumps({"prompt": "a\u2028b"}, ensure_ascii=False).encode() + b"\r\n")
    assert read_prompts(path)[0].content == "a\u2028b"


def test_no_file_and_no_prompts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="cannot be read"):
        read_prompts(tmp_path / "missing.jsonl")
    with pytest.raises(PromptError, match="has no prompts"):
        read_prompts(write(tmp_path / "empty.jsonl", "", " "))
    with pytest.raises(OptionError, match="limit must be 1 or more, not 0"):
        read_prompts(limit=0)


def test_a_limit_takes_evenly_from_the_categories() -> None:
    prompts = [BenchPrompt(f"{c}{i}", c, "x") for c, n in (("a", 9), ("b", 2), ("c", 4)) for i in range(n)]
    assert [p.name for p in spread(prompts, 7)] == ["a0", "b0", "c0", "a1", "b1", "c1", "a2"]
    assert len(spread(prompts)) == 15
    assert sorted(p.name for p in spread(prompts)) == sorted(p.name for p in prompts)


def test_our_own_prompts_cover_five_categories() -> None:
    prompts = read_prompts()
    assert {p.category for p in prompts} == {"coding", "math", "summary", "qa", "edit"}
    assert [p.category for p in read_prompts(limit=5)] == ["coding", "math", "summary", "qa", "edit"]
    assert all(p.chat for p in prompts)
    assert len({p.name for p in prompts}) == len(prompts)


def test_the_chat_template_is_for_messages_only() -> None:
    message, raw = BenchPrompt("m", "qa", "two words", chat=True), BenchPrompt("r", "qa", "two words")
    assert message.ids(WordTokenizer("template")) == [100, 3, 5]
    assert message.ids(WordTokenizer(None)) == [3, 5]
    assert raw.ids(WordTokenizer("template")) == [3, 5]
    assert BenchPrompt("i", "qa", (1, 2)).ids(None) == [1, 2]
    with pytest.raises(PromptError, match="m is text and this model has no tokenizer"):
        message.ids(None)
