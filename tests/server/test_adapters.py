"""A request whose model is an adapter's name is written by that adapter, in one batch with all others."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from pilotfish import SamplingParams
from pilotfish.errors import OptionError
from pilotfish.models.base import ModelOutput
from tests.server.fakes import MESSAGES, Gated, a_server, events, expected, joined, serving, table

TURNS = {"": 0, "law": 3, "wit": 11}
PARAMS = {"seed": 5, "max_tokens": 20}


class Adapted(Gated):
    """Each adapter turns the table's lines in its own way."""

    def __init__(self) -> None:
        plain = table()
        super().__init__(257, order=1)
        self.table, self.info = plain.table, replace(plain.info, adapters=("law", "wit"))

    def forward(self, batch: Any, cache: Any, **named: Any) -> ModelOutput:
        output = super().forward(batch, cache, **named)
        counts = [span.feed.num_wanted for span in batch.spans]
        turned = [
            rows.roll(TURNS[cache.adapter(span.feed.sequence)], 1)
            for span, rows in zip(batch.spans, torch.split(output.logits_NV, counts), strict=True)
        ]
        return ModelOutput(torch.cat(turned), output.taps)


def turned(name: str) -> Gated:
    model = table()
    model.table = model.table.roll(TURNS[name], 2)
    return model


@pytest.fixture(scope="module")
def client():
    with serving(a_server(Adapted(), served_model_name="base")) as client:
        yield client


@pytest.mark.parametrize("name", ["base", "law", "wit", None])
def test_the_model_s_name_chooses(client: Any, name: str | None) -> None:
    body = PARAMS | {"prompt": "hello"} | ({} if name is None else {"model": name})
    own = name if name in ("law", "wit") else ""
    (right,) = expected("hello", SamplingParams(**PARAMS), turned(own))
    answer = client.post("/v1/completions", json=body).json()
    assert answer["choices"][0]["text"] == right.text and answer["model"] == (name or "base")
    chunks = events(client.post("/v1/completions", json=body | {"stream": True}))
    assert joined(chunks) == right.text and {chunk["model"] for chunk in chunks} == {name or "base"}
    chat = client.post("/v1/chat/completions", json=PARAMS | {"messages": MESSAGES, "model": name})
    assert chat.status_code == 200 and chat.json()["model"] == (name or "base")


def test_they_say_different_things(client: Any) -> None:
    """The control of the above."""
    assert len({expected("hello", SamplingParams(**PARAMS), turned(name))[0].text for name in TURNS}) == 3


def test_models_are_listed_with_their_base(client: Any) -> None:
    found = client.get("/v1/models").json()["data"]
    assert [(card["id"], card["parent"]) for card in found] == [("base", None), ("law", "base"), ("wit", "base")]
    assert client.get("/v1/models/law").json()["parent"] == "base"
    refused = client.post("/v1/completions", json={"prompt": "hello", "model": "lwa"})
    assert refused.status_code == 404
    assert refused.json()["error"]["message"] == "the model 'lwa' is not served here; 'base', 'law', 'wit' are"


def test_a_name_that_is_taken() -> None:
    with pytest.raises(OptionError, match="the model and an adapter are both called 'law'"):
        a_server(Adapted(), served_model_name="law")
