"""The architecture, as a test: which layer may import which, and what the pure core may not touch.

A layer is a folder or a top-level module of the package. A new one needs an entry in `MAY_IMPORT`:
that is the moment to think about where it belongs.
"""

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

import tallystick

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "tallystick"
SIMULATOR = ROOT / "tests" / "simulation"
FUNCTION_LINES_MAX = 70
MODULE_LINES_MAX = 450

# Layer: what it may import besides itself; each stands above those that may import it.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "values": set(),
    "host": {"errors"},
    "codec": {"errors", "values", "host"},
    "source": {"errors", "values"},
    "state": {"errors", "host", "codec"},
    "epoch": {"errors", "values", "source", "state"},
    "ports": {"values", "codec", "source", "state", "epoch"},
    "storage": {"errors"},
    "checkpoint": {"errors", "values", "host", "source", "state", "epoch", "ports", "storage"},
    "kafka": {"errors", "values", "host", "codec", "source", "epoch"},
    "postgres": {"errors", "host", "codec", "epoch"},
    "files": {"errors", "epoch", "storage"},
    "options": {"errors", "values", "codec", "source", "epoch", "kafka"},
}
MAY_IMPORT["run"] = {*MAY_IMPORT} - {"storage", "kafka", "postgres", "files", "options"}
MAY_IMPORT["spark"] = {*MAY_IMPORT} - {"postgres", "files"}
MAY_IMPORT["api"] = {*MAY_IMPORT} - {"host", "ports", "checkpoint", "postgres", "files"}
MAY_IMPORT["testing"] = {"errors", "host", "kafka"}
MAY_IMPORT["demo"] = {"epoch", "testing", "__init__"}  # it uses the package as a user would
MAY_IMPORT["ops"] = {*MAY_IMPORT} - {"host", "codec", "options", "run"}
MAY_IMPORT["__init__"] = {*MAY_IMPORT} - {
    "values",
    "host",
    "checkpoint",
    "kafka",
    "demo",
    "testing",
}

PURE = ("errors", "values", "codec", "source", "state", "epoch", "ports")
NOT_PURE = "state/pyspark/"
"""Runs classes that users wrote against PySpark's API."""
PURE_MAY_IMPORT = {
    "bisect",
    "collections",
    "contextlib",
    "crc32c",
    "dataclasses",
    "enum",
    "functools",
    "itertools",
    "json",
    "llvmlite",
    "math",
    "numba",
    "numpy",
    "pyarrow",
    "re",
    "struct",
    "typing",
    "zlib",
    "tallystick",
}
ONLY_HERE = {
    "kafka": {"kafka/protocol.py"},  # its message classes are no public interface: one place
    # Nothing read back from Kafka or storage may ever run code; members of a gang prove a secret.
    "pickle": {"spark/gang/messages.py"},
    "cloudpickle": set(),
    "marshal": set(),
}
PATHS_BELOW_A_CHECKPOINT = {
    "FOLDER",
    "METADATA",
    "OFFSETS",
    "COMMITS",
    "DECISIONS",
    "manifest_path",
}
"""Only `checkpoint/` knows what lies where below one. (`epoch` and `state` have the names of their
own files there, and the demo looks from outside.)"""
LISTS_OR_WRITES = {"names", "put", "put_new"}
MAY_PRINT = ("ops/cli.py", "demo/", "__main__.py")

NO_DOCSTRING_BEGINS_WITH = {"What", "Whether", "Where", "Which", "Of", "Those", "Who", "Whose"}
NO_CLASS_IS_CALLED = re.compile(
    r"_?(?:Told|Heard|Held|Left|Found|Built|Sent|Written|Shown|Known|Kept|Made|Seen|Done"
    r"|[A-Z][a-z]{2,}(?:ed|ing))"
)
"""A bare participle: of what?"""

NOT_FOR_TIME = re.compile(
    r"\bbehind (?:the|its|a|an|each|every|that|it|this|epoch) "
    r"(?:\w+ )?(?:decision|commit|epoch|manifest|fence|question|start|failure|end)\b"
)
"""Behind is for places; for time it is after."""

STUB = PACKAGE / "__init__.pyi"
MODULES = sorted([*PACKAGE.rglob("*.py"), STUB])


def place(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def layer_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].partition(".")[0]


def imported(tree: ast.AST) -> Iterator[str]:
    """Dotted names of everything a module imports; `from a import b` yields `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute: they say where a thing lives"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def layers_imported(tree: ast.AST) -> set[str]:
    """The layers of this package that a module imports; a public name counts as `__init__`."""
    parts = (name.split(".") for name in imported(tree))
    return {
        rest[0] if rest and rest[0] in MAY_IMPORT else "__init__"
        for top, *rest in parts
        if top == "tallystick"
    }


def public(body: list[ast.stmt]) -> Iterator[ast.ClassDef | ast.FunctionDef]:
    """Public classes and functions, and what is public inside of them; overloads say no more."""
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            if not any(ast.unparse(each) == "overload" for each in node.decorator_list):
                yield node
            if isinstance(node, ast.ClassDef):
                yield from public(node.body)


def docstrings(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """What has a docstring: modules, classes, functions, and the assignment before a bare text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            yield getattr(node, "name", "the module"), ast.get_docstring(node) or ""
        if isinstance(node, ast.Module | ast.ClassDef):
            for named, text in pairwise(node.body):
                is_text = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
                if is_text and isinstance(named, ast.Assign | ast.AnnAssign):
                    yield ast.unparse(named)[:60], str(text.value.value)


@pytest.fixture(params=MODULES, ids=place)
def module(request) -> tuple[Path, ast.Module, str]:
    text = request.param.read_text()
    if request.param == STUB:  # lazy_loader takes relative imports only
        text = text.replace("from .", "from tallystick.")
    return request.param, ast.parse(text), text


def test_imports_point_one_way(module):
    path, tree, _ = module
    layer = layer_of(path)
    assert layer in MAY_IMPORT, f"{layer} is new: say in MAY_IMPORT what it may import"

    strange = layers_imported(tree) - MAY_IMPORT[layer] - {layer}

    assert not strange, f"{layer} must not import {sorted(strange)}"


def test_the_core_touches_nothing_outside(module):
    """No Kafka, Spark, files, clock, threads, chance: so a simulation is the whole truth of it."""
    path, tree, _ = module
    if layer_of(path) in PURE and not place(path).startswith(NOT_PURE):
        names = {name for name in imported(tree) if not name.startswith("urllib.parse.")}
        strange = {name.split(".")[0] for name in names} - PURE_MAY_IMPORT

        assert not strange, f"{layer_of(path)} is pure and must not import {sorted(strange)}"


def test_dangerous_imports_stay_where_they_belong(module):
    path, tree, _ = module
    for name in imported(tree):
        places = ONLY_HERE.get(name.split(".")[0])

        assert places is None or place(path) in places, f"{place(path)} must not import {name}"


def test_functions_and_modules_fit_the_reader(module):
    path, tree, text = module
    lines = len(text.splitlines())
    assert lines <= MODULE_LINES_MAX, f"{place(path)}: {lines} lines"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1

            assert length <= FUNCTION_LINES_MAX, f"{place(path)}, {node.name}: {length} lines"


def test_public_things_say_what_they_are(module):
    path, tree, _ = module
    assert ast.get_docstring(tree), f"{place(path)} says nothing"
    for node in public(tree.body):
        assert ast.get_docstring(node), f"{place(path)}: {node.name} says nothing"


def test_english_is_plain(module):
    """Docstrings say what a thing does or is; names of classes and modules are nouns."""
    path, tree, text = module
    assert not (found := NOT_FOR_TIME.search(text)), f"{place(path)}: {found}"
    for name, said in docstrings(tree):
        first = said.partition(" ")[0]
        assert first not in NO_DOCSTRING_BEGINS_WITH, f"{place(path)}: {name}: {said}"
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            assert not NO_CLASS_IS_CALLED.fullmatch(node.name), f"{place(path)}: {node.name}"
        if isinstance(node, ast.alias) and node.asname:
            assert len(node.asname) > 1, f"{place(path)}: {node.name} as {node.asname}"


def test_nobody_else_knows_paths_below_a_checkpoint(module):
    path, tree, _ = module
    if layer_of(path) not in ("api", "run", "spark", "ops"):
        return
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(found), names=imported) if found.startswith(
                ("tallystick.checkpoint", "tallystick.epoch", "tallystick.state")
            ):
                known = PATHS_BELOW_A_CHECKPOINT & {each.name for each in imported}
                assert not known, f"{place(path)} imports {known} of {found}"
            case ast.Attribute(attr="FOLDER" | "METADATA" | "DECISIONS"):
                raise AssertionError(f"{place(path)}:{node.lineno} names a folder of a checkpoint")
            case ast.Call(func=ast.Attribute(value=target, attr=name)) if (
                name in LISTS_OR_WRITES
                and ast.unparse(target).rpartition(".")[2].strip("_") in ("storage", "checkpoint")
            ):
                raise AssertionError(f"{place(path)}:{node.lineno} calls {name} of a checkpoint")


def test_only_programs_print(module):
    path, tree, _ = module
    if not any(allowed in place(path) for allowed in MAY_PRINT):
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        names = [call.func.id for call in calls if isinstance(call.func, ast.Name)]

        assert "print" not in names, f"{place(path)} prints"


def test_every_public_name_is_where_the_package_looks_for_it():
    for name in tallystick.__all__:
        assert getattr(tallystick, name) is not None, name


def test_the_table_names_nothing_that_is_gone():
    """An entry for a layer that does not exist would let its successor in unseen."""
    assert set(MAY_IMPORT) == {layer_of(path) for path in MODULES}


def reached_from(folder: Path) -> set[Path]:
    """Return the modules of the package that a folder's import, directly or through others."""
    found: set[Path] = set()
    new = sorted(folder.glob("*.py"))
    while new:
        path = new.pop()
        found.add(path)
        for name in imported(ast.parse(path.read_text())):
            top, *rest = name.split(".")
            paths = [PACKAGE.joinpath(*rest[:depth]) for depth in range(1, len(rest) + 1)]
            modules = {each.with_suffix(".py") for each in paths if top == "tallystick"}
            new += sorted(each for each in modules - found if each.exists() and each not in new)
    return found


def test_the_simulator_reaches_neither_kafka_nor_spark():
    found = reached_from(SIMULATOR)
    reached = {layer_of(path) for path in found if path.is_relative_to(PACKAGE)}

    assert {"epoch", "run"} <= reached
    assert not reached & {"kafka", "spark", "postgres", "files"}


def test_the_order_has_no_cycles():
    """`__init__` apart, which the demo uses as a user would."""
    done: set[str] = set()
    while left := [layer for layer in MAY_IMPORT if layer not in done]:
        free = [layer for layer in left if MAY_IMPORT[layer] <= done | {layer, "__init__"}]
        assert free, f"these import each other: {left}"
        done.update(free)
