"""A draft with another vocabulary is proved as it is run: in both models' tokens, in every part of the proof."""

import json

import pytest

from pilotfish.drafters import registry, wording
from pilotfish.drafters.draft_model import DraftModelDrafter
from pilotfish.models.load import Loaded
from pilotfish.proof import run_verify
from tests.drafters.two_vocabularies import DRAFT, PROMPT, TARGET, TARGET_TOKENS, config


@pytest.fixture
def prompts(tmp_path) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in (PROMPT, PROMPT[1:])))
    return str(path)


def test_it_is_lossless(options, monkeypatch):
    worded = []
    words = DraftModelDrafter._words

    def noted(self, draft, setting, tokenizer):
        made = words(self, draft, setting, tokenizer)
        if draft.name == DRAFT.info.name:
            worded.append(type(made))
        return made

    monkeypatch.setattr(DraftModelDrafter, "_words", noted)
    speculation = registry.parse(config(vocabulary_scheme="intersection"))
    report = run_verify(options(draws=100, max_tokens=10), Loaded(TARGET, TARGET_TOKENS), speculation)
    failed = {check.name for check in report.checks if not check.passed}
    assert failed <= {"control: a drafter that lies about q is found out"}, "that one takes more draws"
    assert len(worded) > 4 and wording.SameTokens not in worded
    assert any(check.name.startswith("draft_model, rejection: ") for check in report.checks)
