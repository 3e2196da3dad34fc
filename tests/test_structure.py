"""The shape of the package: imports run one way, every module says what it is, and the public names are all listed."""

import ast
import importlib
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import pilotfish

PACKAGE = Path(pilotfish.__file__).parent
# Each may import those before it. What is not listed (bench, cli, server, ...) is on top: no layer imports it.
LAYERS = (
    "version",
    "errors",
    "lazily",
    "decoding",
    "paged",
    "attention",
    "native",
    "models",
    "heads",
    "drafters",
    "engine",
    "llm",
)
MODULES = sorted(PACKAGE.rglob("*.py"))
LABELS = [path.relative_to(PACKAGE).as_posix() for path in MODULES]


def part_of(path: Path) -> str:
    """The sub-package or top-level module that a file belongs to; the package's own __init__ is 'pilotfish'."""
    first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "pilotfish" if first == "__init__" else first


def imported_parts(path: Path, source: str | None = None) -> set[str]:
    """Parts of the package that a file imports, at its top or inside functions."""
    found = set()
    package = ["pilotfish", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8") if source is None else source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            whole = ".".join([*base, *([node.module] if node.module else [])])
            names = [whole if whole != "pilotfish" else f"pilotfish.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            head, _, rest = name.partition(".")
            if head == "pilotfish":
                part = rest.partition(".")[0]
                found.add(part if (PACKAGE / part).is_dir() or (PACKAGE / f"{part}.py").is_file() else "pilotfish")
    return found - {part_of(path)}


def forbidden(part: str, imported: set[str]) -> set[str]:
    """Those of the imported parts that do not lie below this one. The package itself does not either: its __init__
    imports everything."""
    if part not in LAYERS:
        return set()
    return imported - set(LAYERS[: LAYERS.index(part)])


@pytest.mark.parametrize("path", MODULES, ids=LABELS)
def test_imports_run_one_way(path: Path):
    wrong = forbidden(part_of(path), imported_parts(path))
    assert not wrong, f"{path.relative_to(PACKAGE)} imports {', '.join(sorted(wrong))}"


def test_the_parts_on_top_have_an_order_too():
    graph: dict[str, set[str]] = {}
    for path in MODULES:
        graph.setdefault(part_of(path), set()).update(imported_parts(path))
    assert {"decoding", "engine", "llm"} <= set(graph)
    tuple(TopologicalSorter(graph).static_order())  # raises CycleError


def test_every_layer_that_exists_is_where_it_was_planned():
    layers = [layer for layer in LAYERS if (PACKAGE / layer).is_dir() or (PACKAGE / f"{layer}.py").is_file()]
    assert set(LAYERS) - set(layers) <= {"heads"}, "a renamed layer would no longer be checked"


@pytest.mark.parametrize(
    ("file", "source", "wrong"),
    [
        ("decoding/draft.py", "from ..paged import cache", {"paged"}),
        ("models/base.py", "def f():\n    from ..engine.engine import Engine", {"engine"}),
        ("engine/engine.py", "import pilotfish.bench.clock", {"bench"}),
        ("paged/cache.py", "from .. import llm", {"llm"}),
        ("paged/cache.py", "from pilotfish import LLM", {"pilotfish"}),
        ("engine/engine.py", "from ..drafters.base import Drafter\nfrom .options import x\nimport math", set()),
    ],
)
def test_an_import_the_wrong_way_would_be_seen(file: str, source: str, wrong: set[str]):
    """Negative control."""
    path = PACKAGE / file
    assert forbidden(part_of(path), imported_parts(path, source)) == wrong


@pytest.mark.parametrize("path", MODULES, ids=LABELS)
def test_every_module_says_what_it_is(path: Path):
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert docstring, f"{path.relative_to(PACKAGE)} has no docstring"


def test_public_names_are_sorted_and_exist():
    names = pilotfish.__all__
    # Constants, classes, the rest: as ruff sorts them.
    assert names == sorted(names, key=lambda name: (not name.isupper(), not name[0].isupper(), name))
    assert all(hasattr(pilotfish, name) for name in names)


def test_public_names_are_complete():
    """What `pilotfish/__init__.py` imports for type checkers is public, and nothing else is; but ``__version__``."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    (typed,) = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for node in typed.body if isinstance(node, ast.ImportFrom)]
    assert {alias.asname or alias.name for node in imports for alias in node.names} == set(pilotfish.__all__)
    assert set(dir(pilotfish)) >= set(pilotfish.__all__)


@pytest.mark.parametrize("package", ["pilotfish", "pilotfish.bench", "pilotfish.proof"])
def test_names_found_on_first_use_are_those_that_type_checkers_see(package: str):
    module = importlib.import_module(package)
    tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
    (typed,) = [node for node in tree.body if isinstance(node, ast.If)]
    for node in typed.body:
        assert isinstance(node, ast.ImportFrom)
        home = importlib.import_module(f"{package}.{node.module}")
        assert all(getattr(module, alias.name) is getattr(home, alias.name) for alias in node.names)
    with pytest.raises(AttributeError, match=f"'{package}' has no attribute 'nothing'"):
        module.nothing  # noqa: B018


def test_every_error_is_public():
    from pilotfish import errors

    classes = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert classes <= set(pilotfish.__all__)
