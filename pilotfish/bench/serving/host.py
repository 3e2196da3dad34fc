"""The server under trial: a process of its own with the server's app, and two routes that only a trial needs.

    /state    what the process holds: pages, places, tasks, threads, open files, bytes of memory
    /own      completions by `LLM.generate` in the engine's thread, timed: the engine's own speed

It does not know what is tried. The one trick: /own is a command of the engine's thread like any other, so model, caches
and drafter are the very ones that serve.
"""

import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ...decoding.sampling import SamplingParams
from ...llm import LLM
from ...server.app import Server
from ...server.options import ServeOptions
from ...server.run import _Uvicorn, bind

READ_TIMEOUT = 5.0  # seconds; short, so that trials see its end
MAX_QUEUE = 256


def add_routes(server: Server) -> None:
    """Make a server tell of itself."""

    async def state(_request: Request) -> Response:
        return JSONResponse(state_of(server) | {"tasks": len(asyncio.all_tasks())})

    async def own(request: Request) -> Response:
        asked = await request.json()
        loop, answer = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()
        server.engine.post(lambda: _hand_over(loop, answer, lambda: own_speed(server.llm, **asked)))
        return JSONResponse(await answer)

    server.app.router.routes += [Route("/state", state), Route("/own", own, methods=["POST"])]


def touch_pages(llm: LLM) -> None:
    """Have the whole pool of pages in memory from the start: what grows later is something else."""
    cache = llm.engine.cache
    for rows in (*cache.keys, *cache.values):
        rows.zero_()


def state_of(server: Server) -> dict[str, int]:
    """What the process holds by now; memory in bytes."""
    engine = server.llm.engine
    status = Path("/proc/self/status").read_text()
    memory = int(status.partition("VmRSS:")[2].split()[0]) * 1024
    return {
        "pages": engine.cache.pool.num_held,
        "places": server.engine.num_open,
        "requests": len(engine.scheduler),
        "threads": threading.active_count(),
        "files": len(os.listdir("/proc/self/fd")),
        "memory": memory,
    }


def own_speed(llm: LLM, prompts: list[str], params: dict[str, Any]) -> dict[str, Any]:
    """Tokens and seconds of these prompts as one batch, and their texts."""
    started = time.perf_counter()
    done = llm.generate(prompts, SamplingParams(**params))
    seconds = time.perf_counter() - started
    tokens = sum(one.usage.completion_tokens for one in done)
    return {"tokens": tokens, "seconds": seconds, "texts": [one.text for one in done]}


def _hand_over(loop: asyncio.AbstractEventLoop, answer: "asyncio.Future[Any]", work: Callable[[], Any]) -> None:
    try:
        result = work()
    except Exception as error:
        loop.call_soon_threadsafe(answer.set_exception, error)
    else:
        loop.call_soon_threadsafe(answer.set_result, result)


def main(arguments: str) -> None:
    """Serve on a free port, whose number is the first line of output, until SIGTERM."""
    with bind("127.0.0.1", 0) as listener:
        options = ServeOptions(read_timeout=READ_TIMEOUT, max_queue=MAX_QUEUE, served_model_name="tried")
        llm = LLM(**json.loads(arguments))
        touch_pages(llm)
        server = Server(llm, options)
        add_routes(server)
        listener.listen(2048)
        print(listener.getsockname()[1], flush=True)
        try:
            _Uvicorn(server).run([listener])
        finally:
            server.close()


if __name__ == "__main__":
    main(sys.argv[1])
