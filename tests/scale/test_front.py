"""The front without Ray: what a client hears when replicas die, are full, or never come."""

import asyncio
import json

import pytest

from pilotfish.scale.front import Front, merged
from pilotfish.server.options import ServeOptions
from tests.scale.fakes import Local
from tests.server.fakes import PHRASE, Caller, until

TEXT = "/v1/completions"


def go(path, body, *, lost_after=(), busy=False, seconds=0.0, **options):
    """(the call, the replicas) of one request, answered as far as it goes."""

    async def run():
        local = Local(ServeOptions(**options), seconds=seconds)
        local.lost_after, local.busy = list(lost_after), busy
        local.app = Front(local, ServeOptions(**options))
        caller = Caller(local, path, body)
        try:
            await asyncio.wait_for(caller.run(), 20)
        finally:
            await until(lambda: not local.replica.server.engine.num_open)
            local.replica.close()
        return caller, local

    return asyncio.run(run())


def asked(**body):
    return {"prompt": "x", "max_tokens": 20, "temperature": 0, "ignore_eos": True} | body


def blocks(caller):
    return [one.removeprefix("data: ") for one in caller.text.split("\n\n") if one]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_the_app_s(stream):
    caller, local = go(TEXT, asked(stream=stream))
    assert caller.status == 200 and len(local.asked) == 1
    if stream:
        *chunks, end = blocks(caller)
        assert end == "[DONE]"
        text = "".join(json.loads(one)["choices"][0]["text"] for one in chunks)
    else:
        text = json.loads(caller.text)["choices"][0]["text"]
    assert text == (PHRASE * 3).encode()[:20].decode(errors="ignore")


@pytest.mark.parametrize(("stream", "lost"), [(False, [0]), (False, [0, 0, 0]), (True, [0]), (True, [1])])
def test_a_request_whose_replica_dies_before_a_byte_of_its_body_is_asked_again(stream, lost):
    """Where it says 1, a stream's header got through, and waited for a body."""
    caller, local = go(TEXT, asked(stream=stream), lost_after=lost)
    assert caller.status == 200 and len(local.asked) == len(lost) + 1
    assert sum(message["type"] == "http.response.start" for message in caller.sent) == 1
    assert "error" not in caller.text
    assert caller.text.count('"finish_reason":"length"') == 1


def test_a_stream_whose_replica_dies_ends_with_an_error_event():
    caller, local = go(TEXT, asked(stream=True), lost_after=[4], seconds=0.005)
    assert caller.status == 200 and len(local.asked) == 1, "what was streamed must not be streamed again"
    *chunks, error, end = blocks(caller)
    assert chunks and json.loads(error)["error"]["code"] == "replica_lost" and end == "[DONE]"
    assert caller.sent[-1]["more_body"] is False


def test_a_request_that_kills_all_who_see_it_is_given_up():
    caller, local = go(TEXT, asked(), lost_after=[0] * 50)
    assert caller.status == 500 and len(local.asked) == 5
    assert "5 engines were lost" in caller.text


def test_a_whole_answer_that_broke_off_is_never_ended_as_if_it_were_whole():
    from pilotfish.scale.front import _Answer
    from pilotfish.server.refusals import Refusal

    async def run():
        sent = []

        async def send(message):
            sent.append(message)

        answer = _Answer(send)
        start = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]}
        await answer.take([start, {"type": "http.response.body", "body": b"{", "more_body": True}])
        with pytest.raises(Refusal):
            await answer.end(Refusal(502, "lost"))
        assert len(sent) == 2

    asyncio.run(run())


def test_too_many_that_wait_are_429():
    caller, _ = go(TEXT, asked(), busy=True)
    headers = dict(caller.sent[0]["headers"])
    assert caller.status == 429 and headers[b"retry-after"] == b"1"


def test_a_client_that_leaves_ends_the_replica_s_work():
    async def run():
        local = Local(seconds=0.01)
        local.app = Front(local, ServeOptions())
        caller = Caller(local, TEXT, asked(stream=True, max_tokens=3000))
        task = asyncio.create_task(caller.run())
        await asyncio.wait_for(caller.received.wait(), 20)
        caller.hung_up.set()
        await asyncio.wait_for(task, 20)
        engine = local.replica.server.llm.engine
        await until(lambda: not engine.has_work and not engine.cache.pool.num_held)
        local.replica.close()

    asyncio.run(run())


def test_bodies_are_bounded_before_a_replica_is_asked():
    caller, local = go(TEXT, b"x" * 2000, max_body_size=1000)
    assert caller.status == 413 and not local.asked


def test_nobody_free_in_time_is_told():
    async def never(*_words):
        await asyncio.sleep(60)
        yield []

    async def run():
        local = Local()
        local.ask = never
        local.app = Front(local, ServeOptions(request_timeout=0.1))
        caller = Caller(local, TEXT, asked())
        await asyncio.wait_for(caller.run(), 20)
        local.replica.close()
        return caller

    caller = asyncio.run(run())
    assert caller.status == 504 and "no engine was free" in caller.text


def test_metrics_are_of_each_replica():
    text = merged(
        {"a": '# TYPE x_total counter\nx_total{m="1"} 2.0\n', "b": '# TYPE x_total counter\nx_total{m="1"} 3.0\n'}
    )
    lines = [line for line in text.decode().splitlines() if not line.startswith("#")]
    assert lines == ['x_total{m="1",replica="a"} 2.0', 'x_total{m="1",replica="b"} 3.0']


def test_turns_of_a_conversation_are_asked_under_one_name():
    first = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    more = first | {
        "messages": [*first["messages"], {"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
    }
    other = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    (one,), (two,), (three,) = (go("/v1/chat/completions", body)[1].asked for body in (first, more, other))
    assert one == two != three and one
