"""The four trials. Each takes the server's port and returns its findings, and what of them breaks a promise.

They do not know how the server came to be. The one trick: every request has a seed or temperature 0, so a text under
load is right or wrong, not merely plausible: it is compared with what the same request got alone.
"""

import asyncio
import itertools
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..prompts import BenchPrompt
from .client import CHAT, TEXT, Outcome, ask, gathered, head, post, read_slowly, stream, until_closed, vanish
from .host import READ_TIMEOUT
from .options import ServingOptions

MOST_SPREAD = 0.03  # of memory after the warm-up
LEAST_RATIO = 0.95  # of the engine's own tokens per second
MOST_DELAY = 1.5  # of an answer beside slow readers, as a factor
_LATE_SECONDS = 2.0
_SAMPLE_SECONDS = 5.0
_SETTLE_SECONDS = 30.0
_MOST_AT_ONCE = 24  # clients that vanish
_SLOW_BYTES = 30
_NUM_SLOW = 4
_MOST_JOBS = 30
_HELD = ("pages", "places", "requests", "tasks", "threads", "files")


@dataclass(slots=True)
class Findings:
    """Of one trial. rows: what was found, to be printed. broken: which promises did not hold."""

    rows: dict[str, str] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)

    def demand(self, holds: bool, told: str) -> None:
        """Note a promise that was broken."""
        if not holds:
            self.broken.append(told)


Job = tuple[str, dict[str, Any]]


def jobs(prompts: Sequence[BenchPrompt], max_tokens: int) -> list[Job]:
    """Requests of all kinds: chats and texts, sampled and greedy, with log-probabilities, stop strings, JSON."""
    kinds: list[tuple[str, dict[str, Any]]] = [
        (CHAT, {"seed": 1}),
        (TEXT, {"seed": 2, "ignore_eos": True}),
        (CHAT, {"temperature": 0}),
        (CHAT, {"seed": 3, "logprobs": True, "top_logprobs": 3}),
        (TEXT, {"seed": 4, "stop": ["\n\n", " the"], "min_tokens": 3}),
        (CHAT, {"seed": 5, "response_format": {"type": "json_object"}}),
    ]
    texts = [prompt.content for prompt in prompts if isinstance(prompt.content, str)]
    made: list[Job] = []
    for text, (path, more) in itertools.islice(itertools.product(texts, kinds), _MOST_JOBS):
        prompt = {"prompt": text} if path == TEXT else {"messages": [{"role": "user", "content": text}]}
        made.append((path, prompt | {"max_tokens": max_tokens} | more))
    return made


async def warm_up(port: int, asked: Sequence[Job]) -> None:
    """All requests at once: pools of threads start theirs when they are first needed."""
    await asyncio.gather(*(stream(port, path, body | {"max_tokens": 4}) for path, body in asked))


async def settled(port: int) -> dict[str, int]:
    """The server's state once nothing is under way, or after a while whatever it then is."""
    state: dict[str, int] = {}
    for _ in range(int(_SETTLE_SECONDS * 10)):
        state = await ask(port, "GET", "/state")
        if not any(state[name] for name in ("pages", "places", "requests")):
            await asyncio.sleep(0.3)  # for sockets and tasks to be gone
            return dict(await ask(port, "GET", "/state"))
        await asyncio.sleep(0.1)
    return state


def nothing_left(before: dict[str, int], after: dict[str, int], findings: Findings) -> None:
    """Compare two states of an idle server."""
    for name in _HELD:
        findings.rows[f"{name} before, after"] = f"{before[name]}, {after[name]}"
        findings.demand(after[name] <= before[name], f"{after[name] - before[name]} more {name} than before")


async def load(port: int, prompts: Sequence[BenchPrompt], options: ServingOptions) -> Findings:
    """Streams that never pause."""
    asked = jobs(prompts, options.max_tokens)
    alone = [await stream(port, *job) for job in asked]
    await warm_up(port, asked)
    findings, errors, wrong = Findings(), list[str](), list[str]()
    findings.demand(not any(one.error for one in alone), f"alone: {[one.error for one in alone if one.error][:1]}")
    before, loop = await settled(port), asyncio.get_running_loop()
    started = loop.time()
    end = started + options.warmup + options.seconds
    outcomes: list[Outcome] = []

    async def worker(number: int) -> None:
        rng = random.Random(number)
        while loop.time() < end:
            which = rng.randrange(len(asked))
            found = await stream(port, *asked[which])
            outcomes.append(found)
            if found.error:
                errors.append(found.error)
            elif (found.text, found.finish) != (alone[which].text, alone[which].finish):
                wrong.append(f"request {which}: {found.text!r} instead of {alone[which].text!r}")

    async def watch() -> list[tuple[float, int]]:
        samples = []
        while loop.time() < end:
            await asyncio.sleep(_SAMPLE_SECONDS)
            state = await ask(port, "GET", "/state")
            samples.append((loop.time() - started, state["memory"]))
            print(f"  {samples[-1][0]:5.0f} s  {len(outcomes)} answers, {state}", file=sys.stderr, flush=True)
        return samples

    watching = asyncio.create_task(watch())
    await asyncio.gather(*(worker(number) for number in range(options.streams)))
    seconds = loop.time() - started
    memory = [size for at, size in await watching if at >= options.warmup] or [0]
    spread = (max(memory) - min(memory)) / max(1, min(memory))
    part = max(1, len(memory) // 5)
    drift = statistics.median(memory[-part:]) / max(1, statistics.median(memory[:part])) - 1
    tokens = sum(one.num_tokens for one in outcomes)
    findings.rows |= {
        "streams, seconds": f"{options.streams}, {seconds:.0f}",
        "answers, tokens": f"{len(outcomes)}, {tokens} ({tokens / seconds:.0f} a second)",
        "errors": str(len(errors)),
        "texts unlike those alone": f"{len(wrong)} of {len(outcomes)}, {len(asked)} requests",
        "memory after warm-up, MiB": f"{min(memory) / 2**20:.0f} to {max(memory) / 2**20:.0f} ({spread:.2%})",
        "its drift, first fifth to last": f"{drift:+.2%}",
    }
    findings.demand(not errors, f"errors: {errors[:3]}")
    findings.demand(not wrong, f"wrong texts: {wrong[:2]}")
    findings.demand(spread <= MOST_SPREAD, f"memory moved by {spread:.2%} after the warm-up")
    nothing_left(before, await settled(port), findings)
    return findings


async def vanishing(port: int, prompts: Sequence[BenchPrompt], options: ServingOptions) -> Findings:
    """Clients that hang up: at once, in a header, in a body, while they wait, while they read; a third by a reset."""
    rng, asked = random.Random(0), jobs(prompts, options.max_tokens)
    await warm_up(port, asked)
    before = await settled(port)
    gate, refused = asyncio.Semaphore(_MOST_AT_ONCE), 0

    async def one() -> None:
        nonlocal refused
        path, body = rng.choice(asked)
        whole = post(path, body | {"stream": rng.random() < 0.7, "n": rng.choice((1, 1, 1, 2))})
        sent = rng.choice((whole, whole, whole, whole[: rng.randrange(len(whole))], b""))
        wait, reset = rng.choice((0.0, rng.random() * 0.05, rng.random())), rng.random() < 1 / 3
        async with gate:
            try:
                await vanish(port, sent, wait, reset=reset)
            except OSError:
                refused += 1

    await asyncio.gather(*(one() for _ in range(options.connects)))
    findings = Findings({"clients that vanished": str(options.connects), "that could not connect": str(refused)})
    findings.demand(refused == 0, f"{refused} clients could not connect")
    nothing_left(before, await settled(port), findings)
    after = await stream(port, *asked[0])
    findings.demand(after.error is None, f"the next request failed: {after.error}")
    return findings


async def stubborn(port: int, prompts: Sequence[BenchPrompt], options: ServingOptions) -> Findings:
    """Clients that take their time, beside one that does not."""
    asked, loop = jobs(prompts, options.max_tokens), asyncio.get_running_loop()
    path, body = asked[0]
    long = body | {"max_tokens": 8 * options.max_tokens, "logprobs": True, "top_logprobs": 20, "ignore_eos": True}
    wanted = await stream(port, path, long)
    await warm_up(port, asked)
    before = await settled(port)

    async def typical() -> float:
        times = []
        for _ in range(5):
            started = loop.time()
            await stream(port, path, body)
            times.append(loop.time() - started)
        return statistics.median(times)

    quiet = await typical()
    data = post(path, long | {"stream": True})
    slow = [asyncio.create_task(read_slowly(port, data, _SLOW_BYTES)) for _ in range(_NUM_SLOW)]
    halves = {
        "half a header": head("POST", path, b"x")[:40],
        "a header and no body": head("POST", path, b"x" * 10),
        "nothing at all": b"",
    }
    hanging = {name: asyncio.create_task(until_closed(port, half)) for name, half in halves.items()}
    await asyncio.sleep(1)
    for _ in range(int(_SETTLE_SECONDS * 10)):  # the slow ones' answers are made meanwhile, and wait for them
        if not (await ask(port, "GET", "/state"))["places"]:
            break
        await asyncio.sleep(0.1)
    pages = (await ask(port, "GET", "/state"))["pages"]
    beside = await typical()
    texts = [gathered(lines) for lines in await asyncio.gather(*slow)]
    findings = Findings(
        {
            "seconds of an answer, alone": f"{quiet:.2f}",
            f"beside {_NUM_SLOW} that read a byte a second": f"{beside:.2f}",
            "pages that those hold": str(pages),
            "their texts, at last, that are right": f"{sum(t.text == wanted.text for t in texts)} of {len(texts)}",
        }
    )
    findings.demand(all(one.text == wanted.text and not one.error for one in texts), "a slow reader's text is wrong")
    findings.demand(pages == 0, f"slow readers hold {pages} pages")
    findings.demand(beside < MOST_DELAY * quiet + 0.1, "others wait for a slow reader")
    for name, task in hanging.items():
        seconds, said = await task
        first = said.splitlines()[0].decode() if said else "silently"
        findings.rows[f"hung up on: {name}"] = f"after {seconds:.1f} s, {first}"
        findings.demand(seconds < READ_TIMEOUT + _LATE_SECONDS, f"{name}: only after {seconds:.1f} s")
    nothing_left(before, await settled(port), findings)
    return findings


async def overhead(port: int, prompts: Sequence[BenchPrompt], options: ServingOptions) -> Findings:
    """Tokens per second, through HTTP and of the engine alone, in turns; the first round of each is not counted."""
    findings, loop = Findings(), asyncio.get_running_loop()
    texts = [prompt.content for prompt in prompts if isinstance(prompt.content, str)]
    params = {"max_tokens": options.max_tokens, "temperature": 0.0, "ignore_eos": True}

    async def served(chosen: list[str]) -> tuple[float, list[str]]:
        started = loop.time()
        found = await asyncio.gather(*(stream(port, TEXT, params | {"prompt": text}) for text in chosen))
        seconds = loop.time() - started
        findings.demand(not any(one.error for one in found), f"errors: {[one.error for one in found if one.error][:1]}")
        return sum(one.num_tokens for one in found) / seconds, [one.text for one in found]

    async def own(chosen: list[str]) -> tuple[float, list[str]]:
        found = await ask(port, "POST", "/own", {"prompts": chosen, "params": params})
        return found["tokens"] / found["seconds"], found["texts"]

    for width in options.widths:
        chosen = list(itertools.islice(itertools.cycle(texts), width))
        speeds: dict[str, list[float]] = {"served": [], "own": []}
        for number in range(options.rounds + 1):
            both: dict[str, list[str]] = {}
            for name in ("own", "served") if number % 2 else ("served", "own"):
                speed, both[name] = await (served if name == "served" else own)(chosen)
                speeds[name].append(speed)
            findings.demand(both["own"] == both["served"], f"concurrency {width}: the two say different texts")
        ratio = statistics.median(a / b for a, b in list(zip(speeds["served"], speeds["own"], strict=True))[1:])
        best = max(speeds["served"][1:]) / max(speeds["own"][1:])
        shown = {name: f"{statistics.median(values[1:]):.1f}" for name, values in speeds.items()}
        findings.rows[f"concurrency {width}, tokens/s"] = (
            f"{shown['served']} served, {shown['own']} the engine's own; ratio {ratio:.3f} (best of each: {best:.3f})"
        )
        findings.demand(ratio >= LEAST_RATIO, f"concurrency {width}: {ratio:.3f} of the engine's own speed")
    return findings
