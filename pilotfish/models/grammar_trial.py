"""Trying a grammar out in another process, because compiling one may take for ever and cannot be interrupted.

It does not know models: the trial's tokens are the 256 bytes. The one trick: the process is kept and asked again, so
a trial costs little more than compiling; one that takes too long, or too much memory, is killed, and only its grammar
is refused. Besides compiling it, a trial walks along some texts that the grammar admits.

    this process    line: source, limits  ->  worker (`python -m pilotfish.models.grammar_trial`)
                    line: what is wrong   <-
"""

import atexit
import contextlib
import json
import random
import selectors
import subprocess
import sys
import threading
from typing import Any

SECONDS = 5.0
LIMITS: dict[str, Any] = {"max_lexer_states": 50_000, "max_grammar_size": 200_000, "verbose_errors": False}
_MEMORY = 2**30  # bytes of address space
_NUM_WALKS, _WALK = 2, 48


def try_out(source: str) -> str:
    """Why this grammar, in llguidance's form, cannot be used; empty if it can."""
    with _lock:
        try:
            return _worker.ask(source)
        except TimeoutError:
            return f"it takes longer than {SECONDS:g} s to compile"
        except EOFError:
            return "it takes too much memory to compile"


class _Worker:
    """The process, started when it is first needed and again after it was killed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, source: str) -> str:
        """What is wrong with a grammar. Raises TimeoutError or EOFError if the worker came to no answer."""
        if self._process is None or self._process.poll() is not None:
            self.stop()
            command = [sys.executable, "-m", "pilotfish.models.grammar_trial"]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
            self._read(30)  # it says hello: starting does not count
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(source).encode() + b"\n")
            self._process.stdin.flush()
            return str(json.loads(self._read(SECONDS)))
        except (TimeoutError, EOFError, BrokenPipeError) as error:
            self.stop()
            if isinstance(error, BrokenPipeError):
                raise EOFError from error
            raise

    def _read(self, seconds: float) -> bytes:
        """One line. It is short, so it comes in one piece."""
        assert self._process is not None and self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(seconds):
                raise TimeoutError
        line = self._process.stdout.readline()
        if not line:
            raise EOFError
        return line

    def stop(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
            self._process = None


_lock, _worker = threading.Lock(), _Worker()
atexit.register(_worker.stop)


# -- in the worker -------------------------------------------------------------------------------------------------


class _Bytes:
    """llguidance's idea of a tokenizer: a token per byte, and an end of text."""

    eos_token_id, bos_token_id, special_token_ids = 256, None, (256,)
    tokens = (*(bytes([i]) for i in range(256)), b"<eos>")

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def _trial(tokens: Any, source: str) -> str:
    import llguidance

    matcher = llguidance.LLMatcher(tokens, source, log_level=0, limits=llguidance.LLParserLimits(**LIMITS))
    chance = random.Random(0)
    for _ in range(_NUM_WALKS):
        state = matcher.deep_copy()
        for _ in range(_WALK):
            mask = state.compute_bitmask()
            if state.is_error():
                return str(state.get_error())
            allowed = [byte for byte in range(256) if mask[byte // 8] >> byte % 8 & 1]
            if not allowed:
                break
            state.consume_token(chance.choice(allowed))
    return str(matcher.get_error())


def _limit_memory() -> None:
    try:
        import resource
    except ModuleNotFoundError:  # not on Windows; there only the time is limited
        return
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = _MEMORY if hard == resource.RLIM_INFINITY else min(_MEMORY, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))


def _main() -> None:
    import llguidance

    tokens = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes()))
    _limit_memory()
    print(json.dumps(""), flush=True)
    for line in sys.stdin:
        print(json.dumps(_trial(tokens, json.loads(line))), flush=True)


if __name__ == "__main__":
    _main()
