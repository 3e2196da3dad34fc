"""Measuring costs: kept between starts, the fastest of several, made again when the file is no use."""

import json

import pytest

from pilotfish.engine import costs
from tests.fakes import TableModel


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PILOTFISH_CACHE", str(tmp_path))


def kept(tmp_path):
    (path,) = (tmp_path / "costs").glob("*.json")
    return path


def test_measured_once(tmp_path, monkeypatch):
    model = TableModel()
    first = costs.measured(model)
    assert 0 < first.seconds(1) <= first.seconds(16)
    assert json.loads(kept(tmp_path).read_text())["rounds"] >= costs._ENOUGH
    passes = model.num_passes
    assert costs.measured(model).seconds(8) == first.seconds(8)
    assert model.num_passes == passes


def test_a_busy_start_is_put_right_by_the_next_one(tmp_path):
    costs.measured(TableModel())
    path = kept(tmp_path)
    found = json.loads(path.read_text())
    slow = dict.fromkeys(found["seconds"], 100.0)
    path.write_text(json.dumps({"rounds": 1, "seconds": slow}))
    assert costs.measured(TableModel()).seconds(1) < 1
    path.write_text(json.dumps({"rounds": 1, "seconds": dict.fromkeys(slow, 1e-8)}))
    assert costs.measured(TableModel()).seconds(64) == 1e-8


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[1, 2]",
        '{"rounds": 1e999, "seconds": {"1": 1}}',
        "[" * 100_000,
        '{"rounds": 9, "seconds": {"64": 5e-324}}',
        '{"1": 0.5}',
        '{"rounds": 99, "seconds": {"1": -1}}',
        '{"rounds": 99, "seconds": {}}',
    ],
)
def test_a_file_that_is_no_use_is_made_again(tmp_path, text):
    costs.measured(TableModel())
    path = kept(tmp_path)
    path.write_text(text)
    assert costs.measured(TableModel()).seconds(1) > 0
    assert json.loads(path.read_text())["rounds"] >= 1


def test_a_slow_model_is_measured_once_up_to_16_rows(monkeypatch):
    clock = iter(range(10**6))
    monkeypatch.setattr(costs.time, "perf_counter", lambda: float(next(clock)))
    points, rounds = costs.measure(TableModel(), 1.0)
    assert rounds == 1 and max(points) == 16


def test_a_short_context(tmp_path):
    points, _ = costs.measure(TableModel(context=20))
    assert max(points) <= 19
