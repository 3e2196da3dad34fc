"""What Prometheus hears: counters with vLLM's names and meanings under our prefix, so that its dashboards work.

It does not know requests or HTTP. The one trick: everything is counted from the engine's events, after the commit walk
has cut what never happened, so drafted, accepted and emitted tokens add up. States (running, pages, ...) are read
from the engine when somebody asks, and cost a step nothing.
"""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics import MetricWrapperBase

from ..decoding.request import FinishReason
from ..engine.engine import Engine, Event
from ..llm import LLM

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SOON = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
_STEP = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2, 5)
_LABEL = "model_name"


class Metrics:
    """One server's numbers; a `Watch`. model_name: their label."""

    def __init__(self, llm: LLM, model_name: str):
        self.registry = CollectorRegistry()
        self._engine, self._model = llm.engine, model_name
        self._drafting = llm.speculation.method != "none"
        self._failures = 0  # of drafters, that were counted
        for name, text, read in _STATES:
            self._gauge(name, text, read)
        self.prompt_tokens = self._counter("prompt_tokens", "tokens of prompts")
        self.generation_tokens = self._counter("generation_tokens", "tokens emitted")
        self.drafts = self._counter("spec_decode_num_drafts", "passes of a completion that had a draft")
        self.draft_tokens = self._counter("spec_decode_num_draft_tokens", "tokens drafted")
        self.accepted = self._counter("spec_decode_num_accepted_tokens", "drafted tokens that were emitted")
        self.emitted = self._counter("spec_decode_num_emitted_tokens", "tokens emitted by passes that had a draft")
        self.accepted_at = self._labelled("spec_decode_num_accepted_tokens_per_pos", "the same by place", "position")
        self.disabled = self._labelled("spec_decode_disabled", "passes of a completion without a draft", "reason")
        self.ended = self._labelled("request_success", "completions ended", "finished_reason")
        self.first_token = self._histogram("time_to_first_token_seconds", "from the request to its first token", _SOON)
        self.between = self._histogram("inter_token_latency_seconds", "between tokens; a run shares its pass", _STEP)
        self.whole = self._histogram("e2e_request_latency_seconds", "from the request to its end", _SOON)
        self.drafted_per_step = self._histogram(
            "spec_decode_chosen_k", "nodes of each draft", (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 63)
        )

    # -- Watch ---------------------------------------------------------------------------------------------------

    def added(self, num_prompt_tokens: int) -> None:
        self.prompt_tokens.inc(num_prompt_tokens)

    def stepped(self, event: Event, seconds: float, first: bool) -> None:
        num_tokens = len(event.tokens)
        self.generation_tokens.inc(num_tokens)
        if first:
            self.first_token.observe(seconds)
        else:
            for _ in event.tokens:
                self.between.observe(seconds / num_tokens)
        if event.num_drafted:
            self.drafts.inc()
            self.draft_tokens.inc(event.num_drafted)
            self.accepted.inc(event.num_accepted)
            self.emitted.inc(num_tokens)
            for position in range(event.num_accepted):
                self.accepted_at.labels(self._model, str(position)).inc()
        elif self._drafting:
            failed = self._engine.num_failed_drafts > self._failures
            self.disabled.labels(self._model, "drafter_failed" if failed else "no_draft_pays").inc()
        if self._drafting:
            self.drafted_per_step.observe(event.num_drafted)
        self._failures = self._engine.num_failed_drafts

    def finished(self, reason: FinishReason, seconds: float) -> None:
        self.ended.labels(self._model, str(reason)).inc()
        self.whole.observe(seconds)

    # -- reading -------------------------------------------------------------------------------------------------

    def page(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self.registry)

    def value(self, name: str, **labels: str) -> float:
        """One number by its full name; 0 if nothing was counted yet. For tests and logs."""
        return self.registry.get_sample_value(f"pilotfish:{name}", {_LABEL: self._model, **labels}) or 0.0

    # -- making --------------------------------------------------------------------------------------------------

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"pilotfish:{name}", text, [_LABEL], registry=self.registry).labels(self._model)

    def _labelled(self, name: str, text: str, label: str) -> Counter:
        return Counter(f"pilotfish:{name}", text, [_LABEL, label], registry=self.registry)

    def _histogram(self, name: str, text: str, bounds: tuple[float, ...]) -> Histogram:
        made = Histogram(f"pilotfish:{name}", text, [_LABEL], registry=self.registry, buckets=bounds)
        return made.labels(self._model)

    def _gauge(self, name: str, text: str, read: Callable[[Engine], float]) -> MetricWrapperBase:
        gauge = Gauge(f"pilotfish:{name}", text, [_LABEL], registry=self.registry).labels(self._model)
        gauge.set_function(lambda: float(read(self._engine)))
        return gauge


_STATES: tuple[tuple[str, str, Callable[[Engine], float]], ...] = (
    ("num_requests_running", "completions in the batch", lambda engine: len(engine.scheduler.running)),
    ("num_requests_waiting", "completions that wait for a seat", lambda engine: len(engine.scheduler.waiting)),
    ("kv_pages_used", "pages that hold keys and values", lambda engine: engine.cache.pool.num_held),
    (
        "kv_cache_usage_perc",
        "share of the pages that is used, from 0 to 1",
        lambda engine: engine.cache.pool.num_held / engine.cache.pool.num_pages,
    ),
    ("num_preemptions", "completions that gave their pages back for a while", lambda e: e.scheduler.num_preemptions),
    ("spec_decode_num_failed_drafts", "errors of the drafter", lambda engine: engine.num_failed_drafts),
)
