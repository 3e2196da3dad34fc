"""Spans: one per request, below the caller's, ended however the request ends; and nothing where the package is not."""

import sys
import types

import pytest

from tests.server.fakes import MESSAGES, a_server, serving


class Span:
    def __init__(self, name, context, kind, attributes, start_time):
        self.name, self.context, self.kind, self.attributes = name, context, kind, dict(attributes)
        self.started, self.num_ends = start_time, 0

    def set_attribute(self, name, value):
        self.attributes[name] = value

    def end(self):
        self.num_ends += 1


@pytest.fixture
def spans(monkeypatch):
    """What OpenTelemetry would get; its interface is a few names."""
    found = []

    def start_span(*words, **named):
        found.append(Span(*words, **named))
        return found[-1]

    package = types.ModuleType("opentelemetry")
    package.trace = types.SimpleNamespace(
        get_tracer=lambda _name: types.SimpleNamespace(start_span=start_span),
        SpanKind=types.SimpleNamespace(SERVER="server"),
    )
    package.propagate = types.SimpleNamespace(extract=lambda headers: headers.get("traceparent"))
    monkeypatch.setitem(sys.modules, "opentelemetry", package)
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_a_span(spans, stream):
    with serving(a_server(served_model_name="pilot")) as client:
        body = {"messages": MESSAGES, "max_tokens": 7, "seed": 1, "ignore_eos": True, "stream": stream, "n": 2}
        client.post("/v1/chat/completions", json=body, headers={"traceparent": "00-1-2-01"})
        client.post("/v1/chat/completions", json=body | {"temperature": -1})  # never began
    (span,) = spans
    assert (span.name, span.context, span.kind, span.num_ends) == ("chat pilot", "00-1-2-01", "server", 1)
    assert span.attributes["gen_ai.usage.input_tokens"] == 9
    assert span.attributes["gen_ai.usage.output_tokens"] == 14
    assert span.attributes["gen_ai.response.finish_reasons"] == ["length", "length"]


def test_without_the_package_there_is_none(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with serving(a_server()) as client:
        assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200
