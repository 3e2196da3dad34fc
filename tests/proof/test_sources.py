"""The proof on an encoder-decoder target: it passes for what is right, and sees sources that are mixed up."""

import pytest

from pilotfish.decoding.paths import join, split
from pilotfish.drafters import registry
from pilotfish.models.load import Loaded
from pilotfish.proof import run_verify
from pilotfish.proof.memo import MemoLM
from tests.fakes import SourcedTable

TARGET = SourcedTable(12, num_phases=3, sharpness=2.0)
DRAFT = SourcedTable(12, order=1, seed=5, sharpness=1.0)


def prove(options, target, method: str, **more):
    config = {"method": method} | ({"model": Loaded(DRAFT, None)} if method == "draft_model" else {})
    report = run_verify(options(**more), Loaded(target, None), registry.parse(config))
    return {check.name for check in report.checks if not check.passed}


@pytest.mark.parametrize("method", ["draft_model", "layer_skip"])
def test_drafting_from_a_source_is_lossless(options, method):
    assert prove(options, TARGET, method) == set()


def test_a_pass_that_mixes_up_its_sources_is_found_out(options):
    """The first request's source for all of a batch: alone, every text is right."""

    class Mixed(SourcedTable):
        def forward(self, batch, cache, **more):
            self.first = batch.spans[0]
            return super().forward(batch, cache, **more)

        def before(self, span, cache):
            return super().before(self.first, cache)

    failed = prove(options, Mixed(12, num_phases=3, sharpness=2.0), "ngram", texts_only=True)
    assert {"text at temperature 0", "text at temperature 1 (seeded)"} <= failed


def test_a_model_asked_once_tells_sources_apart():
    memo = MemoLM(TARGET)
    text = [0, 3, 4, 5]
    for source in ([1, 2], [2, 1], [1, 2, 3]):
        path = join(source, text)
        assert split(path) == (tuple(source), tuple(text))
        assert (memo.logits(path) == TARGET.logits_of(path)).all()
        memo.read(join(source, [*text, 6, 7]), 2)
    num_passes = memo.num_passes
    for source in ([1, 2], [2, 1], [1, 2, 3]):
        path = join(source, [*text, 6])
        assert (memo.logits(path) == TARGET.logits_of(path)).all()
    assert memo.num_passes == num_passes
