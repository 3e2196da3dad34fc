"""Prometheus' numbers add up to what answers said, and have the names that dashboards know."""

import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.fakes import a_server, serving, singer, table

NAME = re.compile(r"pilotfish:\w+")
VLLM_S = [  # what vLLM calls vllm:...
    "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens",
    "spec_decode_num_accepted_tokens_per_pos",
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prompt_tokens",
    "generation_tokens",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "request_success",
]


@pytest.mark.parametrize("model", [singer, table])
def test_counters_add_up_to_what_the_answers_said(model):
    server = a_server(model(), per_request_spec_decode_metrics="detailed")
    with serving(server) as client:
        blocks, usages = [], []
        for body in ({"temperature": 0}, {"seed": 1, "n": 2}, {"seed": 2, "stop": "€"}, {"max_tokens": 1}):
            answer = client.post("/v1/completions", json={"prompt": "abc" * 3, "max_tokens": 40} | body).json()
            blocks.append(answer["metrics"]["speculative_decoding"])
            usages.append(answer["usage"])
    value = server.metrics.value
    assert value("spec_decode_num_drafts_total") == sum(block["num_spec_steps"] for block in blocks)
    assert value("spec_decode_num_draft_tokens_total") == sum(block["num_draft_tokens"] for block in blocks) > 0
    accepted = sum(block["num_accepted_draft_tokens"] for block in blocks)
    assert value("spec_decode_num_accepted_tokens_total") == accepted
    per_step = [count for block in blocks for count in block["per_step_accepted"]]
    for position in range(7):
        found = value("spec_decode_num_accepted_tokens_per_pos_total", position=str(position))
        assert found == sum(count > position for count in per_step)
    num_tokens = sum(usage["completion_tokens"] for usage in usages)
    assert value("generation_tokens_total") == num_tokens
    assert value("prompt_tokens_total") == 9 * 5  # the second has two completions
    assert sum(value("request_success_total", finished_reason=r) for r in ("stop", "length")) == 5
    assert value("e2e_request_latency_seconds_count") == value("time_to_first_token_seconds_count") == 5
    first_passes = value("spec_decode_num_emitted_tokens_total") + value(
        "spec_decode_disabled_total", reason="no_draft_pays"
    )
    assert first_passes == num_tokens, "a pass without a draft emits one token"
    assert value("kv_pages_used") == value("num_requests_running") == value("num_requests_waiting") == 0
    assert value("spec_decode_disabled_total", reason="drafter_failed") == 0


def test_the_page_parses_and_has_vllm_s_names():
    with serving(a_server(singer(), served_model_name="pilot")) as client:
        client.post("/v1/completions", json={"prompt": "abc", "temperature": 0, "max_tokens": 30})
        page = client.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = {family.name: family for family in text_string_to_metric_families(page.text)}
    assert {f"pilotfish:{name}" for name in VLLM_S} <= families.keys()
    for family in families.values():
        assert all(sample.labels["model_name"] == "pilot" for sample in family.samples)
    positions = [
        sample.labels["position"]
        for sample in families["pilotfish:spec_decode_num_accepted_tokens_per_pos"].samples
        if sample.name.endswith("_total")
    ]
    assert positions == [str(position) for position in range(6)]


def test_two_servers_count_apart():
    one, other = a_server(), a_server()
    with serving(one) as client:
        client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 3, "seed": 1})
    assert one.metrics.value("generation_tokens_total") > other.metrics.value("generation_tokens_total") == 0


def test_plain_decoding_is_nothing_disabled():
    server = a_server(llm={"method": "none"})
    with serving(server) as client:
        client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 3, "seed": 1})
    assert server.metrics.value("spec_decode_disabled_total", reason="no_draft_pays") == 0
    assert server.metrics.value("spec_decode_num_drafts_total") == 0


def test_a_drafter_that_fails_is_counted_and_fails_nobody(monkeypatch):
    server = a_server()

    def propose(*_):
        raise RuntimeError("no idea")

    monkeypatch.setattr(server.llm.engine.drafter, "propose", propose)
    with serving(server) as client:
        answer = client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 3, "seed": 1, "ignore_eos": True})
    assert answer.json()["usage"]["completion_tokens"] == 3
    failed = server.metrics.value("spec_decode_disabled_total", reason="drafter_failed")
    assert failed == server.metrics.value("spec_decode_num_failed_drafts") > 0


def test_the_dashboard_asks_for_numbers_that_there_are():
    dashboard = json.loads((Path(__file__).parents[2] / "docs" / "grafana.json").read_text())
    asked = {name for panel in dashboard["panels"] for t in panel["targets"] for name in NAME.findall(t["expr"])}
    with serving(a_server(singer())) as client:
        client.post("/v1/completions", json={"prompt": "abc", "temperature": 0, "max_tokens": 30})
        page = client.get("/metrics").text
    there = {sample.name for family in text_string_to_metric_families(page) for sample in family.samples}
    assert len(asked) > 12 and asked <= there
