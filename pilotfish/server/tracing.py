"""OpenTelemetry spans, one per HTTP request that got a place, if that package is installed; else nothing.

It does not know where traces go: that is the business of whoever installs and configures OpenTelemetry. The one trick:
a span is made when its answer begins, back-dated to the question, and ended when the ticket is closed, so there is one
place to add it and one to end it. Names are OpenTelemetry's for generative models. No text gets into a span.
"""

import time
from collections.abc import Callable, Mapping

from .answers import Answer


def begin(headers: Mapping[str, str], asked: float, answer: Answer) -> Callable[[], None]:
    """Start a span below the caller's, if its headers name one; returns what ends it. asked: by `time.perf_counter`."""
    try:
        from opentelemetry import propagate, trace
    except ModuleNotFoundError:
        return _nothing
    kind = "chat" if answer.KIND.startswith("chat") else "text_completion"
    span = trace.get_tracer("pilotfish").start_span(
        f"{kind} {answer.head['model']}",
        context=propagate.extract(dict(headers)),
        kind=trace.SpanKind.SERVER,
        attributes={
            "gen_ai.operation.name": kind,
            "gen_ai.request.model": answer.head["model"],
            "gen_ai.response.id": answer.head["id"],
            "gen_ai.usage.input_tokens": answer.num_prompt_tokens,
        },
        start_time=time.time_ns() - int((time.perf_counter() - asked) * 1e9),
    )

    def end() -> None:
        reasons = [str(own.finish or "abort") for own in answer.choices]
        span.set_attribute("gen_ai.usage.output_tokens", sum(own.num_tokens for own in answer.choices))
        span.set_attribute("gen_ai.response.finish_reasons", reasons)
        span.set_attribute("pilotfish.num_draft_tokens", sum(answer.stats.per_step_drafted))
        span.set_attribute("pilotfish.num_accepted_draft_tokens", sum(answer.stats.per_step_accepted))
        span.end()

    return end


def _nothing() -> None:
    pass
