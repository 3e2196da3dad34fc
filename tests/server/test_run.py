"""The process: ports, signals, slow headers, flags, and what is said when the extra is missing."""

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx2
import pytest
from click.testing import CliRunner

from pilotfish.cli import main
from pilotfish.errors import OptionError, PilotfishError
from pilotfish.server.options import ServeOptions
from pilotfish.server.run import _trace, _Uvicorn, bind, serve
from pilotfish.trace import TraceFile
from tests.server.fakes import a_server, serving, singer

ROOT = Path(__file__).parents[2]
PROGRAM = """
import time, torch
from tests.server.fakes import Gated, an_llm, singer
from pilotfish.server.options import ServeOptions
from pilotfish.server.run import serve
model = singer(context=100_000)
fast = model.forward
model.forward = lambda *words, **named: (time.sleep(0.005), fast(*words, **named))[1]
serve(ServeOptions(port=0, drain_timeout={patience}), lambda: an_llm(model, method="none", num_pages=5000))
"""


@pytest.mark.parametrize(("again", "patience"), [(False, 60), (True, 60), (False, 0.3)])
def test_the_first_signal_drains_and_the_second_or_a_time_limit_stops(again, patience):
    program, stopped = PROGRAM.format(patience=patience), again or patience < 1
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        line = process.stderr.readline()
        (url,) = re.findall(r"http://127.0.0.1:\d+", line)
        body = {"prompt": "x", "max_tokens": 15_000 if stopped else 60, "temperature": 0, "stream": True}
        with httpx2.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: {")
            process.send_signal(signal.SIGTERM)
            if again:
                time.sleep(0.3)
                assert process.poll() is None
                process.send_signal(signal.SIGTERM)
            blocks = [line.removeprefix("data: ") for line in lines if line]
        assert blocks[-1] == "[DONE]"
        last = json.loads(blocks[-2])
        if stopped:
            assert last["error"]["message"] == "the server was stopped"
        else:
            assert last["choices"][0]["finish_reason"] == "length"
        assert process.wait(10) == 0
        said = process.stderr.read()
        assert "1 completions are ending" in said
        assert again or "Traceback" not in said, "uvicorn was in no hurry"
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def test_a_port_in_use_is_told_before_a_model_is_loaded():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OptionError, match=f"port {port} of 127.0.0.1 is in use; choose another with --port"):
            serve(ServeOptions(port=port), lambda: pytest.fail("loaded"))
        result = CliRunner().invoke(main, ["serve", "--port", str(port), "-m", "nowhere"])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert f"port {port} of 127.0.0.1 is in use" in result.stderr


def test_a_host_that_is_none():
    with pytest.raises(OptionError, match=r"cannot listen on 192\.0\.2\.1 port 0|is no address"):
        bind("192.0.2.1", 0)


def test_a_header_that_never_ends_costs_a_connection_for_a_while_only():
    server = a_server(read_timeout=0.3)
    listener = bind("127.0.0.1", 0)
    listener.listen()
    address = listener.getsockname()
    runner = _Uvicorn(server)
    thread = threading.Thread(target=runner.run, args=([listener],))
    thread.start()
    try:
        url = f"http://127.0.0.1:{address[1]}"
        with httpx2.Client(base_url=url, timeout=10) as client:
            slow = socket.create_connection(address, timeout=10)
            started = time.perf_counter()
            with slow:
                slow.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n")
                assert client.get("/health").status_code == 200
                assert slow.recv(100) == b""
            assert 0.2 < time.perf_counter() - started < 8
            # A connection that has a request under way is not its victim.
            answer = client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 200, "temperature": 0})
            assert answer.status_code == 200
    finally:
        runner.should_exit = True
        thread.join(10)
        listener.close()
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--port", "65536"], "port must be at most 65535, not 65536"),
        (["--max-queue", "-1"], "max_queue must be a whole number, 0 or more, not -1"),
        (["--request-timeout", "0"], "request_timeout must be a number above 0, not 0.0"),
        (["--drain-timeout", "nan"], "drain_timeout must be a number above 0, not nan"),
        (["--api-key", ""], "api_key is empty"),
        (["--method", "ngarm", "--port", "0"], "did you mean 'ngram'?"),
    ],
)
def test_a_wrong_flag_is_one_line(words, says):
    result = CliRunner().invoke(main, ["serve", *words])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert says in result.stderr


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "pilotfish.server.run")
    result = CliRunner().invoke(main, ["serve"])
    assert result.exit_code == 2
    assert result.stderr == "pilotfish: serve needs uvicorn, which is not installed: pip install 'pilotfish[serve]'\n"


def test_the_key_may_come_from_the_environment(monkeypatch):
    seen = []
    monkeypatch.setenv("PILOTFISH_API_KEY", "from there")
    monkeypatch.setattr("pilotfish.server.run.serve", lambda options, _load: seen.append(options))
    assert CliRunner().invoke(main, ["serve"]).exit_code == 0
    assert CliRunner().invoke(main, ["serve", "--api-key", "from here"]).exit_code == 0
    assert [options.api_key for options in seen] == ["from there", "from here"]


@pytest.mark.parametrize(
    "values",
    [{"port": 8000.5}, {"port": True}, {"max_n": 0}, {"served_model_name": ""}, {"stream_granularity": "word"}],
    ids=str,
)
def test_options_out_of_range(values):
    with pytest.raises(OptionError, match=next(iter(values))):
        ServeOptions(**values)


@pytest.mark.parametrize(
    ("name", "value"), [("host", 5), ("host", ""), ("host", None), ("api_key", 5), ("served_model_name", ["a"])]
)
def test_names_that_are_no_texts_are_refused(name, value):
    with pytest.raises(OptionError, match=name):
        ServeOptions(**{name: value})


def test_a_trace_is_appended_and_changes_no_answer(tmp_path):
    """Two starts, one file; each pass of each completion is a line."""
    path, body = tmp_path / "trace.jsonl", {"prompt": "hi", "max_tokens": 20, "temperature": 0}
    with serving(a_server(singer())) as client:
        (plain,) = client.post("/v1/completions", json=body).json()["choices"]
    for start in (1, 2):
        with TraceFile(path, append=True) as file:
            server = a_server(singer())
            _trace(server.llm, file)
            with serving(server) as client:
                (choice,) = client.post("/v1/completions", json=body).json()["choices"]
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        assert choice == plain and sum(len(one["ids"]) for one in records) == 20 * start
        assert "".join(piece for one in records for piece in one["pieces"]) == choice["text"] * start


def test_a_disk_that_is_full_ends_the_trace_and_not_the_answer(tmp_path, caplog):
    server = a_server(singer())
    with TraceFile(tmp_path / "trace.jsonl") as file:
        file.write = lambda _one: (_ for _ in ()).throw(PilotfishError("the trace cannot be written: full"))
        _trace(server.llm, file)
        with serving(server) as client:
            body = {"prompt": "hi", "max_tokens": 20, "temperature": 0}
            assert client.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 20
    assert server.llm.engine.witness is None
    assert [one.message for one in caplog.records] == ["the trace cannot be written: full; nothing is traced any more"]


def test_a_trace_that_cannot_be_written_is_told_before_a_model_is_loaded(tmp_path):
    options = ServeOptions(port=0, trace=str(tmp_path / "nowhere" / "trace.jsonl"))
    with pytest.raises(OptionError, match="the trace cannot be written to"):
        serve(options, lambda: pytest.fail("loaded"))
    with pytest.raises(OptionError, match="trace is empty"):
        ServeOptions(trace="")
