"""The engine's own thread: what becomes of those who ask it when it has ended, and what it notes when it has time."""

import asyncio

from pilotfish.decoding.sampling import SamplingParams
from pilotfish.server.refusals import Refusal
from tests.server.fakes import Caller, a_server, running, table, until

LONG = {"prompt": "hello", "max_tokens": 60, "temperature": 0, "ignore_eos": True}


async def refusal_of(ticket):
    """How long a start takes to be refused, and with what status."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    try:
        await ticket.start([[1, 2]], SamplingParams(max_tokens=2), [])
    except Refusal as refusal:
        return loop.time() - started, refusal.status
    raise AssertionError("it was not refused")


def test_who_asks_a_thread_that_has_ended_hears_so_at_once(monkeypatch):
    """The thread dies of a mistake of ours while a request is being read; its clients do not wait for the deadline."""

    async def scene():
        async with running(a_server(table())) as server:
            ticket = server.engine.open(1)
            monkeypatch.setattr(server.metrics, "added", lambda _num: 1 / 0)
            monkeypatch.setattr("threading.excepthook", lambda _args: None)
            failed = Caller(server, "/v1/completions", LONG)
            await asyncio.wait_for(failed.run(), 20)
            assert failed.status == 503
            await until(lambda: not server.engine.ready)
            seconds, status = await refusal_of(ticket)
            assert status == 503 and seconds < 10  # the deadline is at 600
            ticket.close()
            late = Caller(server, "/v1/completions", LONG)
            await late.run()
            assert late.status == 503

    asyncio.run(scene())


def test_who_asks_while_it_stops_does_too():
    async def scene():
        async with running(a_server(table())) as server:
            ticket = server.engine.open(1)
            server.engine.stop()
            assert (await refusal_of(ticket))[1] == 503
            ticket.close()

    asyncio.run(scene())


def test_served_traffic_counts_for_the_gain_that_is_remembered(monkeypatch):
    noted = []
    monkeypatch.setattr("pilotfish.llm.remember_gain", lambda *words: noted.append(words[2:]))

    async def scene(k):
        async with running(a_server(table(context=512), llm={"num_speculative_tokens": k})) as server:
            for _ in range(3):
                caller = Caller(server, "/v1/completions", LONG | {"max_tokens": 200})
                await caller.run()
                assert caller.status == 200

    asyncio.run(scene("auto"))
    assert noted and all(gain > 0 and num_tokens >= 64 for gain, num_tokens in noted)
    noted.clear()
    asyncio.run(scene(4))
    assert not noted, "a fixed number of drafted tokens has no prediction"
