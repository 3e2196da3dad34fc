"""On a real cluster of two nodes on this machine: twice the speed, homes of conversations, a replica killed under load.

Slow, and skipped without Ray. Each prints what it measured (pytest -s).
"""

import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from pilotfish.scale.routing import conversation, home
from pilotfish.server.options import ServeOptions
from tests.scale.fakes import NUM_SEATS, Slow
from tests.server.fakes import PHRASE

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'pilotfish[ray]'")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # what Ray warns of is not ours
PORT = 18_123
PASS = 0.03  # seconds of the engine
NUM_TOKENS = 40
TEXT = (PHRASE * NUM_TOKENS).encode()[:NUM_TOKENS].decode(errors="ignore")


@pytest.fixture(scope="module")
def cluster():
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    nodes.add_node(num_cpus=1)
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    ray.init(address=nodes.address, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": root}})
    assert len([node for node in ray.nodes() if node["Alive"]]) == 2
    from ray import serve
    from ray.serve.config import HTTPOptions

    serve.start(http_options=HTTPOptions(host="127.0.0.1", port=PORT))
    yield nodes
    serve.shutdown()
    ray.shutdown()
    nodes.shutdown()


@pytest.fixture
def client(cluster):
    with httpx2.Client(base_url=f"http://127.0.0.1:{PORT}", timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def deploy(cluster):
    """Deploys so many engines, unless they are there: it takes a while."""
    from ray import serve

    from pilotfish.scale.deploy import NAME, application
    from pilotfish.scale.options import ScaleOptions

    now = []

    def deploy(replicas):
        if now != [replicas]:
            app = application(Slow(PASS), ServeOptions(), ScaleOptions(ray=True, replicas=replicas), NUM_SEATS)
            serve.run(app, name=NAME)
            now[:] = [replicas]

    return deploy


def ask(client, number=0, **body):
    body = {"prompt": f"{number} asks", "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True} | body
    return client.post("/v1/completions", json=body)


def metrics(client, name):
    """One number of each replica."""
    found = {}
    for line in client.get("/metrics").text.splitlines():
        if line.startswith(f"pilotfish:{name}{{"):
            label, _, value = line.rpartition(" ")
            found[label.partition('replica="')[2].partition('"')[0]] = float(value)
    return found


def rate(client, num=32):
    """Answers a second with many asking at once."""
    with ThreadPoolExecutor(4 * NUM_SEATS) as pool:
        started = time.perf_counter()
        answers = list(pool.map(lambda i: ask(client, i), range(num)))
        seconds = time.perf_counter() - started
    assert {answer.status_code for answer in answers} == {200}
    assert {answer.json()["choices"][0]["text"] for answer in answers} == {TEXT}
    return num / seconds


def test_two_replicas_are_nearly_twice_as_fast_as_one(client, deploy):
    deploy(1)
    rate(client, 8)
    one = rate(client)
    deploy(2)
    rate(client, 8)
    two = rate(client)
    print(f"\none replica: {one:.2f} answers/s, two: {two:.2f}; {two / one:.2f} x")
    assert two >= 1.7 * one


def test_a_conversation_stays_where_its_prefix_is(client, deploy):
    deploy(2)
    homes, expected = [], []
    for number in range(6):
        messages = [{"role": "system", "content": "short"}, {"role": "user", "content": f"talk {number}"}]
        before = metrics(client, "prompt_tokens_total")
        for turn in range(4):
            body = {"messages": messages, "max_tokens": 4, "temperature": 0}
            answer = client.post("/v1/chat/completions", json=body).json()
            messages += [answer["choices"][0]["message"], {"role": "user", "content": f"turn {turn}"}]
        after = metrics(client, "prompt_tokens_total")
        served = {name for name in after if after[name] > before.get(name, 0)}
        homes.append(served)
        name = conversation("/v1/chat/completions", json.dumps({"messages": messages}).encode())
        expected.append({home(name, after)})
    print(f"\nhomes of 6 conversations of 4 turns: {homes}")
    assert homes == expected


def test_one_conversation_that_is_too_much_for_its_home_is_served_elsewhere_too(client, deploy):
    deploy(2)
    before = metrics(client, "generation_tokens_total")
    with ThreadPoolExecutor(4 * NUM_SEATS) as pool:
        answers = list(pool.map(lambda _: ask(client, 0), range(4 * NUM_SEATS)))
    after = metrics(client, "generation_tokens_total")
    moved = {name: after[name] - before.get(name, 0) for name in after}
    print(f"\ntokens by replica: {moved}")
    assert {answer.status_code for answer in answers} == {200}
    assert min(moved.values()) > 0


def test_a_client_that_leaves_frees_its_place(client, deploy):
    deploy(2)
    with client.stream("POST", "/v1/completions", json={"prompt": "x", "max_tokens": 3000, "stream": True}) as response:
        lines = response.iter_lines()
        next(lines)
        assert sum(metrics(client, "num_requests_running").values()) == 1
    deadline = time.monotonic() + 20
    while sum(metrics(client, "num_requests_running").values()) or sum(metrics(client, "kv_pages_used").values()):
        assert time.monotonic() < deadline, "the engine still works for nobody"
        time.sleep(0.2)


def stream(client, number, begun):
    body = {"prompt": f"stream {number}", "max_tokens": 150, "temperature": 0, "stream": True, "ignore_eos": True}
    with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        blocks = []
        for line in response.iter_lines():
            if line:
                blocks.append(line.removeprefix("data: "))
                begun.set()
    return blocks


def test_a_replica_killed_under_load_loses_no_request_but_those_it_streams(client, deploy):
    deploy(2)
    engines = dict(replica_processes())
    assert len(engines) == 2
    begun = [threading.Event() for _ in range(6)]
    with ThreadPoolExecutor(40) as pool:
        streams = [pool.submit(stream, client, i, event) for i, event in enumerate(begun)]
        assert all(event.wait(30) for event in begun)
        loads = metrics(client, "num_requests_running")
        victim = max(loads, key=loads.get)
        whole = [pool.submit(ask, client, i) for i in range(24)]
        time.sleep(0.5)
        before = time.perf_counter()
        os.kill(engines[victim], signal.SIGKILL)
        later = [pool.submit(ask, client, 100 + i) for i in range(8)]
        answers = [one.result() for one in whole + later]
        waited = time.perf_counter() - before
        blocks = [one.result() for one in streams]
    assert {answer.status_code for answer in answers} == {200}
    assert {answer.json()["choices"][0]["text"] for answer in answers} == {TEXT}
    cut = [one for one in blocks if "error" in json.loads(one[-2])]
    for one in blocks:
        assert one[-1] == "[DONE]"
        if one in cut:
            assert json.loads(one[-2])["error"]["code"] == "replica_lost"
        else:
            assert json.loads(one[-2])["choices"][0]["finish_reason"] == "length"
    print(
        f"\n{len(answers)} whole answers, none lost, in {waited:.1f} s; "
        f"{len(cut)} of {len(blocks)} streams cut, of {loads}"
    )
    assert cut, "nothing was killed"
    deadline = time.monotonic() + 60
    while len(metrics(client, "num_requests_running")) < 2:
        assert time.monotonic() < deadline, "no new replica came"
        time.sleep(0.5)


def replica_processes():
    """Names and process ids of the engines: each says its own."""
    from ray import serve

    from pilotfish.scale.deploy import ENGINES, NAME

    handle = serve.get_deployment_handle(ENGINES, NAME)
    return handle.broadcast("process").results(timeout_s=20)


def test_a_batch_is_answered_by_a_pool_and_resumed(cluster, tmp_path):
    from ray import serve

    from pilotfish.scale.data import run_batch_on_ray
    from pilotfish.scale.deploy import NAME
    from pilotfish.scale.options import ScaleOptions
    from pilotfish.server.options import BatchOptions

    serve.delete(NAME)  # which has all the cores
    lines = [
        {
            "custom_id": f"id-{i}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": f"line {i}", "temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True},
        }
        for i in range(24)
    ]
    lines[5]["body"]["promt"] = "x"
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def go():
        options = ScaleOptions(ray=True, replicas=2, cpus_per_replica=0.5)
        started = time.perf_counter()
        run_batch_on_ray(BatchOptions(), source, target, Slow(PASS), options, NUM_SEATS)
        print(f"\n{len(target.read_text().splitlines())} answers, {time.perf_counter() - started:.1f} s with the start")
        answers = [json.loads(line) for line in target.read_text().splitlines()]
        assert sorted(one["custom_id"] for one in answers) == sorted(line["custom_id"] for line in lines)
        wrong = [one for one in answers if one["error"]]
        assert [one["custom_id"] for one in wrong] == ["id-5"] and "prompt" in wrong[0]["error"]["message"]
        texts = {one["response"]["body"]["choices"][0]["text"] for one in answers if not one["error"]}
        assert texts == {TEXT}

    go()
    kept = target.read_text().splitlines(keepends=True)[:10]
    target.write_text("".join(kept) + '{"id": "torn')
    go()
    assert target.read_text().startswith("".join(kept)), "what was there stays as it was"
