"""What is refused, and how: bad bodies, keys, sizes, queues; clients that leave, stall or read slowly."""

import asyncio
import json
import threading

import pytest

from pilotfish import SamplingParams
from tests.server.fakes import (
    MESSAGES,
    Caller,
    a_server,
    events,
    expected,
    running,
    serving,
    singer,
    table,
    until,
)

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LONG = {"prompt": "hello", "max_tokens": 200, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def client():
    with serving(a_server(served_model_name="pilot", max_body_size=20_000, max_n=4)) as client:
        yield client


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        (CHAT, {"tempreature": 1}, "tempreature", "did you mean 'temperature'?"),
        (CHAT, {"max_completion_token": 1}, "max_completion_token", "did you mean 'max_completion_tokens'?"),
        (CHAT, {"guided_jsn": {}}, "guided_jsn", "did you mean 'guided_json'?"),
        (CHAT, {"speculative_config": {}}, "speculative_config", "unknown field"),
        (CHAT, {"audio": {"voice": "x"}}, "audio", "audio is not served here"),
        (CHAT, {"reasoning_effort": "high"}, "reasoning_effort", "would change the text"),
        (TEXT, {"prompt": "a", "echo": True}, "echo", "leave it out (or send null or False)"),
        (TEXT, {"prompt": "a", "best_of": 2}, "best_of", "not served here"),
        (TEXT, {"prompt": "a", "best_of": True}, "best_of", "not served here"),
        (TEXT, {"prompt": "a", "suffix": "x"}, "suffix", "not served here"),
        (TEXT, {"prompt": "a", "bad_words": ["x"]}, "bad_words", "not served here"),
        (CHAT, {"messages": []}, "messages", "at least 1 item"),
        (CHAT, {"messages": "hi"}, "messages", "valid list"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages.0.content", "the role user needs a text"),
        (CHAT, {"messages": [{"role": "usr", "content": "x"}]}, "messages.0.role", "not 'usr'"),
        (CHAT, {"messages": [{"role": "user", "content": None}]}, "messages.0.content", "the role user needs a text"),
        (CHAT, {"messages": [{"role": "user", "content": "x", "extra": 1}]}, "messages.0.extra", "unknown field"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages.0.content.0.type",
            "'text', not 'image_url'",
        ),
        (CHAT, {"top_logprobs": 3}, "top_logprobs", "needs logprobs: true"),
        (CHAT, {"top_logprobs": 21, "logprobs": True}, "top_logprobs", "less than or equal to 20"),
        (CHAT, {"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "differ"),
        (TEXT, {}, "prompt", "field required"),
        (TEXT, {"prompt": None}, "prompt", "not None"),
        (TEXT, {"prompt": []}, "prompt", "at least 1 item"),
        (TEXT, {"prompt": ""}, None, "the prompt is empty"),
        (TEXT, {"prompt": [1, "a"]}, "prompt.1", "valid integer, not 'a'"),
        (TEXT, {"prompt": [1, True]}, "prompt.1", "valid integer, not True"),
        (TEXT, {"prompt": [1, -1]}, "prompt.1", "greater than or equal to 0"),
        (TEXT, {"prompt": [1, 257]}, None, "prompt token 257 is not an id from 0 to 256"),
        (TEXT, {"prompt": "a" * 256}, None, "256 tokens and the context 256"),
        (TEXT, {"prompt": "a", "temperature": -0.1}, "temperature", "greater than or equal to 0"),
        (TEXT, {"prompt": "a", "temperature": "1"}, "temperature", "valid number, not '1'"),
        (TEXT, {"prompt": "a", "temperature": 10**300}, "temperature", "less than or equal to"),
        (TEXT, {"prompt": "a", "top_p": 0}, "top_p", "greater than 0"),
        (TEXT, {"prompt": "a", "n": 0}, "n", "greater than or equal to 1"),
        (TEXT, {"prompt": "a", "n": 5}, "n", "at most 4 completions"),
        (TEXT, {"prompt": ["a", "b"], "n": 3}, "n", "2 prompts x n = 3"),
        (TEXT, {"prompt": "a", "n": 10**30}, "n", "less than or equal"),
        (TEXT, {"prompt": "a", "max_tokens": -1}, "max_tokens", "greater than or equal to 1"),
        (TEXT, {"prompt": "a", "max_tokens": 1.5}, "max_tokens", "valid integer"),
        (TEXT, {"prompt": "a", "min_tokens": 9, "max_tokens": 3}, "min_tokens", "in [0, max_tokens], not 9"),
        (TEXT, {"prompt": "a", "stop": ["x"] * 1000}, "stop", "at most 16 items"),
        (TEXT, {"prompt": "a", "stop": "x" * 300}, "stop", "at most 256 characters"),
        (TEXT, {"prompt": "a", "stop": ["a", ""]}, "stop.1", "at least 1 character"),
        (TEXT, {"prompt": "a", "stop_token_ids": [257]}, "stop_token_ids", "names token 257"),
        (TEXT, {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias", "'x' is no id"),
        (TEXT, {"prompt": "a", "logit_bias": {"-1": 1}}, "logit_bias", "'-1' is no id"),
        (TEXT, {"prompt": "a", "logit_bias": {"300": 1}}, "logit_bias", "names token 300"),
        (TEXT, {"prompt": "a", "logit_bias": {"3": 101}}, "logit_bias", "less than or equal to 100"),
        (TEXT, {"prompt": "a", "logit_bias": [1]}, "logit_bias", "valid dictionary"),
        (TEXT, {"prompt": "a", "stream": "yes"}, "stream", "valid boolean"),
        (TEXT, {"prompt": "a", "stream_granularity": "word"}, "stream_granularity", "'run' or 'token'"),
        (TEXT, {"prompt": "a", "prediction": {"type": "text", "content": "x"}}, "prediction.type", "'content'"),
        ("/tokenize", {}, "prompt", "either prompt or messages"),
        ("/tokenize", {"promt": "a"}, "promt", "did you mean 'prompt'?"),
    ],
    ids=str,
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_mistake_is_a_400_that_names_the_field(client, path, body, param, says, stream):
    body = ({"messages": MESSAGES} if path == CHAT else {}) | body
    if path != "/tokenize" and "stream" not in body:
        body |= {"stream": stream}
    response = client.post(path, json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert says in error["message"], error["message"]


def test_harmless_and_neutral_fields_change_nothing(client):
    """What clients send out of habit: the answer is that without them. The control: a field that matters."""
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 12}
    plain = client.post(CHAT, json=body).json()["choices"]
    habit = {"user": "me", "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "tools": [], "echo": False}
    habit |= {"response_format": {"type": "text"}, "tool_choice": "none", "parallel_tool_calls": False}
    habit |= {"best_of": 1, "length_penalty": 1.0, "audio": None, "top_p": None, "seed": None, "stop": None}
    assert client.post(CHAT, json=body | habit).json()["choices"] == plain
    assert client.post(CHAT, json=body | {"logit_bias": {"65": 100}}).json()["choices"] != plain


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1]",
        b'"x"',
        b"null",
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b"[" * 15_000,
        b'{"prompt": "a", "seed": ' + b"9" * 5_000 + b"}",
        b'{"prompt": "a"} {}',
    ],
)
def test_what_is_no_json_object_is_a_400(client, body):
    response = client.post(TEXT, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["message"]


def test_other_refusals(client):
    assert client.post(TEXT, json={"prompt": "a", "model": "other"}).status_code == 404
    assert client.post(TEXT, json={"prompt": "a", "model": "other"}).json()["error"]["code"] == "model_not_found"
    assert client.post(TEXT, json={"prompt": "a", "model": "pilot", "max_tokens": 1}).status_code == 200
    assert client.get("/v2").status_code == 404
    assert client.get(CHAT).status_code == 405
    assert client.get(CHAT).headers["allow"] == "POST"
    assert client.post(TEXT, json={"prompt": "a" * 20_001}).status_code == 413
    assert client.post(TEXT, content="x=1").status_code == 415
    chunked = client.post(TEXT, content=(b"a" * 9_000 for _ in range(3)), headers={"content-type": "application/json"})
    assert chunked.status_code == 413
    assert client.post(CHAT, json={"messages": MESSAGES, "max_tokens": 1}).status_code == 200


def test_an_answer_may_be_bounded():
    with serving(a_server(max_completion_tokens=5)) as client:
        body = {"messages": MESSAGES, "ignore_eos": True}
        assert client.post(CHAT, json=body).json()["usage"]["completion_tokens"] == 5
        refused = client.post(CHAT, json=body | {"max_tokens": 6})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")
    with serving(a_server(llm={"num_pages": 8})) as client:  # 32 tokens
        assert client.post(CHAT, json=body).json()["usage"]["total_tokens"] == 32
        refused = client.post(CHAT, json=body | {"max_tokens": 60})
        assert refused.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("protect", [False, True])
def test_with_a_key_nobody_is_served_without(protect):
    with serving(a_server(api_key="sesam é", protect_metrics=protect)) as client:
        for header in ({}, {"authorization": "Bearer wrong"}, {"authorization": "sesam é".encode()}, {"api-key": "x"}):
            response = client.post(TEXT, content=b"not even read", headers=header)
            assert response.status_code == 401 and "Bearer" in response.json()["error"]["message"]
            assert client.get("/v1/models", headers=header).status_code == 401
        key = {"authorization": "Bearer sesam é".encode()}
        assert client.post(TEXT, json={"prompt": "a", "max_tokens": 1}, headers=key).status_code == 200
        assert client.get("/health").status_code == 200
        assert client.get("/metrics").status_code == (401 if protect else 200)
        assert client.get("/metrics", headers=key).status_code == 200


# -- at ASGI level: clients that leave -------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_forgotten_within_a_step(stream):
    async def scene():
        model = singer(context=4096)
        async with running(a_server(model)) as server:
            caller = Caller(server, TEXT, LONG | {"max_tokens": 4000, "stream": stream, "n": 2})
            task = asyncio.create_task(caller.run())
            await until(lambda: len(server.llm.engine.scheduler.running) == 2)
            model.gate.clear()
            caller.hung_up.set()
            await until(task.done)
            assert server.engine.num_open == 0
            passes = model.num_passes
            model.gate.set()
            await until(lambda: server.llm.engine.cache.pool.num_held == 0)
            assert model.num_passes <= passes + 1
            assert server.metrics.value("request_success_total", finished_reason="abort") == 2
            await task

    asyncio.run(scene())


def test_a_thousand_that_vanish_leave_nothing_behind():
    async def scene():
        async with running(a_server(table(), llm={"max_num_seqs": 4}, max_queue=50)) as server:
            num_threads = threading.active_count()
            for wave in range(20):
                callers = [
                    Caller(server, TEXT, LONG | {"stream": bool(i % 2), "prompt": "x" * (1 + (wave + i) % 7)})
                    for i in range(12)
                ]
                tasks = [asyncio.create_task(caller.run()) for caller in callers]
                for i, caller in enumerate(callers):
                    if (wave + i) % 3 == 0:
                        await asyncio.sleep(0)
                    caller.hung_up.set()
                await asyncio.gather(*tasks)
            await until(lambda: not server.llm.engine.has_work)
            assert server.llm.engine.cache.pool.num_held == 0
            assert threading.active_count() <= num_threads + 2  # the pool's
            assert len(asyncio.all_tasks()) == 1

    asyncio.run(scene())


def test_when_the_queue_is_full_others_hear_when_to_come_back():
    async def scene():
        model = table()
        async with running(a_server(model, llm={"max_num_seqs": 2}, max_queue=1)) as server:
            model.gate.clear()
            callers = [Caller(server, TEXT, LONG | {"max_tokens": 3}) for _ in range(3)]
            tasks = [asyncio.create_task(caller.run()) for caller in callers]
            await until(lambda: server.engine.num_open == 3)
            late = Caller(server, TEXT, LONG)
            await late.run()
            assert late.status == 429
            headers = dict(late.sent[0]["headers"])
            assert int(headers[b"retry-after"]) >= 1
            assert json.loads(late.text)["error"]["code"] == "queue_full"
            model.gate.set()
            await asyncio.gather(*tasks)
            assert [caller.status for caller in callers] == [200] * 3
            again = Caller(server, TEXT, LONG | {"max_tokens": 3})
            await again.run()
            assert again.status == 200

    asyncio.run(scene())


def test_requests_share_passes_and_get_their_own_texts():
    async def scene():
        model = table()
        async with running(a_server(model, llm={"method": "none"})) as server:
            model.gate.clear()
            bodies = [LONG | {"prompt": "x" * i, "max_tokens": 30, "temperature": 1, "seed": i} for i in range(1, 9)]
            callers = [Caller(server, TEXT, body) for body in bodies]
            tasks = [asyncio.create_task(caller.run()) for caller in callers]
            await until(lambda: server.engine.num_open == 8)
            before = model.num_passes
            model.gate.set()
            await asyncio.gather(*tasks)
            assert model.num_passes - before < 2 * 30  # one after the other they would take 240
            texts = [json.loads(caller.text)["choices"][0]["text"] for caller in callers]
        return texts

    texts = asyncio.run(scene())
    for i, text in enumerate(texts, start=1):
        (wanted,) = expected("x" * i, SamplingParams(seed=i, max_tokens=30, ignore_eos=True))
        assert text == wanted.text


@pytest.mark.parametrize("stream", [False, True])
def test_a_pass_that_fails_ends_its_requests_and_no_others(stream, caplog):
    async def scene():
        model = table()
        async with running(a_server(model, llm={"max_num_seqs": 1})) as server:
            model.gate.clear()
            callers = [Caller(server, TEXT, LONG | {"max_tokens": 5, "stream": stream}) for _ in range(2)]
            tasks = [asyncio.create_task(caller.run()) for caller in callers]
            await until(lambda: server.engine.num_open == 2)
            model.num_broken = 1
            model.gate.set()
            await asyncio.gather(*tasks)
            failed, fine = sorted(callers, key=lambda caller: "error" not in caller.text)
            assert '"the pass failed"' in failed.text and failed.status == (200 if stream else 500)
            assert fine.status == 200 and "error" not in fine.text
            assert server.metrics.value("request_success_total", finished_reason="error") == 1

    asyncio.run(scene())
    assert "a pass failed" in caplog.text


def test_a_request_that_takes_too_long_is_given_up():
    async def scene():
        model = table()
        async with running(a_server(model, request_timeout=0.2)) as server:
            model.gate.clear()
            callers = [Caller(server, TEXT, LONG | {"stream": stream}) for stream in (False, True)]
            tasks = [asyncio.create_task(caller.run()) for caller in callers]
            await asyncio.sleep(0.4)
            model.gate.set()
            await asyncio.gather(*tasks)
            assert callers[0].status == 504
            assert callers[1].status in (200, 504) and "longer than this server allows" in callers[1].text

    asyncio.run(scene())


def test_a_client_that_never_ends_its_body_hears_408():
    async def scene():
        async with running(a_server(read_timeout=0.1)) as server:
            caller = Caller(server, TEXT, b'{"prompt": ', stall=True)
            await caller.run()
            assert caller.status == 408

    asyncio.run(scene())


def test_a_slow_reader_stalls_nobody_and_holds_no_pages():
    async def scene():
        async with running(a_server(singer())) as server:
            slow = Caller(server, TEXT, LONG | {"stream": True})
            open_again = asyncio.Event()
            send = slow._send

            async def stuck(message):
                await send(message)
                if message.get("body"):
                    await open_again.wait()

            slow._send = stuck
            task = asyncio.create_task(slow.run())
            await until(slow.received.is_set)
            await until(lambda: server.llm.engine.cache.pool.num_held == 0)
            assert server.engine.num_open == 0 and not task.done()
            quick = Caller(server, TEXT, LONG)
            await quick.run()
            assert quick.status == 200
            open_again.set()
            await task
            whole = json.loads(quick.text)["choices"][0]["text"]
            parts = [json.loads(block[6:]) for block in slow.text.split("\n\n")[:-2]]
            assert "".join(choice["text"] for part in parts for choice in part["choices"]) == whole

    asyncio.run(scene())


def test_an_ending_server_takes_no_more_and_says_so():
    async def scene():
        model = table()
        async with running(a_server(model)) as server:
            model.gate.clear()
            callers = [Caller(server, TEXT, LONG | {"stream": stream}) for stream in (True, False)]
            tasks = [asyncio.create_task(caller.run()) for caller in callers]
            await until(lambda: server.engine.num_open == 2)
            server.engine.draining = True
            late = Caller(server, TEXT, LONG)
            await late.run()
            assert late.status == 503
            ready = Caller(server, "/health", {})
            ready.scope["method"] = "GET"
            await ready.run()
            assert ready.status == 503
            server.engine.fail_all()
            model.gate.set()
            await asyncio.gather(*tasks)
            assert "the server was stopped" in callers[0].text and callers[1].status == 503

    asyncio.run(scene())


def test_the_engine_s_own_end_leaves_nobody_waiting(monkeypatch):
    async def scene():
        server = a_server()
        monkeypatch.setattr(server.llm.engine, "add", lambda *_words, **_named: 1 / 0)
        async with running(server):
            caller = Caller(server, TEXT, LONG)
            await caller.run()
            assert caller.status == 500

    asyncio.run(scene())


def test_no_prompt_is_logged(caplog):
    caplog.set_level(0)
    with serving(a_server()) as client:
        client.post(TEXT, json={"prompt": "secret", "max_tokens": 2})
        client.post(TEXT, json={"prompt": "secret", "temperature": -1})
        client.post(TEXT, content=b'{"prompt": "secret', headers={"content-type": "application/json"})
    assert "secret" not in caplog.text


def test_a_good_stream_has_no_error_event():
    """Negative control of the error events above."""
    with serving(a_server()) as client:
        chunks = events(client.post(TEXT, json=LONG | {"stream": True}))
    assert len(chunks) > 3 and not any("error" in chunk for chunk in chunks)
