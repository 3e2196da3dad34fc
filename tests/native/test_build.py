"""Building the kernels: what makes a build another build, and what is said where it cannot be had."""

import stat
from pathlib import Path
from typing import Any

import pytest

from pilotfish.errors import ModelError
from pilotfish.models import kernels
from pilotfish.native.build import KINDS, LIBRARY, BuildError, compile_into, kinds, plan, sources
from pilotfish.native.library import Library

AVX2 = {"avx2": True, "fma": True, "f16c": True}
AVX512 = AVX2 | {f"avx512{part}": True for part in ("f", "bw", "vl", "dq", "vnni")}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder; what has been opened or said is forgotten, before and after."""
    monkeypatch.setenv("PILOTFISH_CACHE", str(tmp_path / "cache"))
    kernels._say_once.cache_clear()
    return tmp_path / "cache"


def compiler(folder: Path, script: str) -> str:
    path = folder / "my-c++"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_the_kind_follows_the_cpu() -> None:
    assert kinds({}, "x86_64") == ["plain"]
    assert kinds(AVX2, "x86_64") == ["avx2", "plain"]
    assert kinds(AVX2 | {"avxvnni": True}, "x86_64") == ["vnni256", "avx2", "plain"]
    assert kinds(AVX512, "AMD64")[0] == "vnni512"
    assert kinds(AVX512 | {"avx512vl": False}, "x86_64") == ["avx2", "plain"]
    assert kinds({}, "arm64") == kinds({}, "aarch64") == ["neon"]
    assert kinds({}, "riscv64") == ["plain"]


def test_a_build_is_named_after_all_that_it_depends_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", compiler(tmp_path, "echo version 1"))
    how = plan("avx2")
    first = how.name
    assert first == plan("avx2").name and how.compiler == str(tmp_path / "my-c++")
    others = [plan("plain").name, plan("avx2", ("-g",)).name]
    compiler(tmp_path, "echo version 2")
    others.append(plan("avx2").name)
    monkeypatch.setenv("CXX", f"{tmp_path / 'my-c++'} -DX=1")
    others.append(plan("avx2").name)
    compiler(tmp_path, "echo version 1")
    monkeypatch.setattr("platform.machine", lambda: "other")
    monkeypatch.setenv("CXX", str(tmp_path / "my-c++"))
    others.append(plan("avx2").name)
    assert len({first, *others}) == 6


def test_a_changed_source_is_another_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", compiler(tmp_path, "echo version 1"))
    before = plan("plain").name
    for path in sources():
        (tmp_path / path.name).write_text(path.read_text())
    monkeypatch.setattr("pilotfish.native.build.SOURCES", tmp_path)
    assert plan("plain").name == before
    (tmp_path / "rows.h").write_text((tmp_path / "rows.h").read_text() + "\n")
    assert plan("plain").name != before


def test_nothing_lets_the_compiler_reorder_sums() -> None:
    flags = {flag for kind in KINDS.values() for flag in kind} | set(plan_flags())
    assert "-ffp-contract=off" in flags
    assert not {flag for flag in flags if "fast" in flag or "associative" in flag or "native" in flag}


def plan_flags() -> tuple[str, ...]:
    from pilotfish.native.build import _FLAGS

    return _FLAGS


@pytest.mark.parametrize("cxx", ["", "no-such-compiler -O2"])
def test_without_a_compiler(cxx: str, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("CXX", cxx)
    monkeypatch.setenv("PATH", str(cache))
    with pytest.raises(BuildError, match="no C\\+\\+ compiler"):
        plan("plain")
    assert kernels.runner("auto") is kernels._run_numba is kernels.runner("auto")
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "no C++ compiler" in said and "numba's loops run instead" in said
    with pytest.raises(ModelError, match="kernels 'native' cannot be had.*'numba'"):
        kernels.runner("native")
    assert not list(cache.glob("kernels*"))


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ('[ "$1" = --version ] && echo v1 && exit; echo lanes.h:1: no such register >&2; exit 3', "no such register"),
        ("echo I have expired >&2; exit 1", "I have expired"),
    ],
)
def test_a_compiler_that_fails(
    script: str, words: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("CXX", compiler(tmp_path, script))
    cache.mkdir()
    assert kernels.runner("auto") is kernels._run_numba
    said = capsys.readouterr().err.splitlines()
    assert str(cache / kernels.LOG) in said[-1] and "exit status" in said[-1]
    log = (cache / kernels.LOG).read_text()
    assert words in log and "my-c++" in log
    assert not [path for path in cache.iterdir() if path.is_dir()]  # nothing half made is kept


def test_a_compiler_that_makes_something_else(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = '[ "$1" = --version ] && echo v1 && exit; for last; do :; done; echo nonsense > "$last"'
    monkeypatch.setenv("CXX", compiler(tmp_path, script))
    with pytest.raises(ModelError, match="is not a library of ours"):
        kernels.runner("native")


def test_a_compiler_that_makes_nothing(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("CXX", compiler(tmp_path, "exit 0"))
    assert kernels.runner("auto") is kernels._run_numba
    assert "made no library" in capsys.readouterr().err
    assert not [path for path in cache.iterdir() if path.is_dir()], "else it would be found there for ever"


def test_a_failure_is_met_once(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """By a model, its draft and each layer of a head: the compiler is not asked by each of them."""
    count = tmp_path / "count"
    script = f'[ "$1" = --version ] && echo v1 && exit; echo x >> {count}; exit 3'
    monkeypatch.setenv("CXX", compiler(tmp_path, script))
    for _ in range(3):
        assert kernels.runner("auto") is kernels._run_numba
    with pytest.raises(ModelError, match="exit status 3"):
        kernels.runner("native")
    assert count.read_text() == "x\n" and capsys.readouterr().err.count("Compiling") == 1


def test_a_compiler_that_does_not_take_flags(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    class Other:
        kind = "other"

    monkeypatch.setenv("CXX", compiler(tmp_path, "echo v1"))
    monkeypatch.setattr(kernels, "built", lambda kind: tmp_path)
    monkeypatch.setattr(kernels, "Library", lambda path: Other)
    with pytest.raises(ModelError, match="was built for other instead of"):
        kernels.runner("native")


def test_a_file_that_is_no_library(tmp_path: Path) -> None:
    (tmp_path / LIBRARY).write_bytes(b"\x7fELF nonsense")
    with pytest.raises(ModelError, match="delete its folder"):
        Library(tmp_path / LIBRARY)


def test_unknown_instructions_are_the_compilers_to_refuse(tmp_path: Path) -> None:
    if kernels_cannot_be_built():
        pytest.skip("no C++ compiler here")
    with pytest.raises(BuildError) as caught:
        compile_into(tmp_path, plan("plain", ("-mno-such-thing",)))
    assert "no-such-thing" in caught.value.output


def kernels_cannot_be_built() -> bool:
    try:
        plan("plain")
    except BuildError:
        return True
    return False
