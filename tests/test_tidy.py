"""The architecture, as a test: who may import whom, and what the pure core may not touch.

A part is a folder or a top-level module of the package. A new one needs an entry in `MAY_IMPORT`:
that is the moment to think about where it belongs.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "tallystick"
FUNCTION_LINES_MAX = 70
MODULE_LINES_MAX = 450

WORDS = {"errors", "topic_partition"}
COLUMNS = {
    "codec",
    "spans",
    "formats",
    "json_kernels",
    "kernel_cache",
    "bits",
    "memory",
}  # pure; kernels need their cache
DECISIONS = {"source", "state", "sink"}
VALUES = WORDS | DECISIONS
CORE = VALUES | {"checkpoint", "ports"}

# Part: what it may import besides itself. Top-down: from words to what a user calls.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "stopwatch": set(),
    "topic_partition": set(),
    "formats": WORDS,
    "spans": WORDS,
    "json_kernels": {"kernel_cache"},
    "codec": WORDS,
    "bits": {"kernel_cache"},
    "memory": {"kernel_cache"},
    "source": WORDS | COLUMNS,
    "state": WORDS | COLUMNS,
    "sink": WORDS | COLUMNS,
    "checkpoint": VALUES,
    "ports": VALUES,
    "spark_log": CORE,
    "job": CORE | {"spark_log", "state_files", "wholeness"},
    "run": CORE | {"job", "stopwatch"},
    "decision_log": CORE,
    "handover": CORE | {"decision_log"},
    "participants": VALUES,
    "sim": CORE
    | {"exchange", "exchanged_rows", "job", "keyed_epoch", "keyed_task", "task"}
    | {"decision_log", "fan_out", "gang", "participants", "run", "spark_log"},
    # The doors: ports and values, nothing of each other.
    "cache": set(),
    "parent_process": WORDS,
    "early_daemon": set(),
    "kernel_cache": {"cache"},
    "java": WORDS | {"cache"},
    "exclusive": WORDS,
    "local_files": WORDS,
    "storage": WORDS | {"exclusive", "local_files"},
    "files": WORDS | {"local_files", "sink", "storage"},
    "state_files": CORE,
    "lmdb_environment": WORDS,
    "lmdb_view": WORDS | {"state"},
    "lmdb_store": CORE | {"lmdb_environment", "lmdb_view"},
    "wholeness": CORE | {"state_files"},
    "newest_epoch": CORE | {"decision_log", "wholeness"},
    "newest_committed": CORE | {"newest_epoch"},
    "transactions": VALUES | {"checkpoint"},
    "ops": CORE | {"kafka", "newest_epoch"},
    "checkpoint_says": CORE | {"decision_log", "newest_epoch", "transactions"},
    "settling": CORE
    | {"checkpoint_says", "decision_log", "files", "kafka", "newest_epoch", "ops", "postgres"}
    | {"storage", "transactions"},
    "savepoint_target": CORE,
    "savepoint_files": CORE | {"savepoint_target", "state_files", "wholeness"},
    "savepoint_claims": CORE | {"savepoint_files", "savepoint_target", "wholeness"},
    "savepoints": CORE
    | {"newest_committed", "newest_epoch", "savepoint_claims", "savepoint_files"}
    | {"savepoint_target", "storage"},
    "state_contents": CORE | {"state_files"},
    "migration": CORE
    | {"lmdb_store", "savepoint_files", "savepoint_target", "savepoints"}
    | {"state_contents", "state_files"},
    "registry": VALUES | {"formats"},
    "kafka": VALUES | COLUMNS | {"parent_process", "ports"},
    "postgres": VALUES | COLUMNS,
    # The executor's shell, and the engine that runs it.
    "exchange": VALUES,
    "task": VALUES | {"exchange", "formats", "kafka", "parent_process", "stopwatch"},
    "fan_out": VALUES | {"exchange", "stopwatch", "task"},
    "processors": WORDS | {"codec", "state"},
    "steps": VALUES | {"task"},
    "exchanged_rows": WORDS,
    "keyed_slices": WORDS | {"exchanged_rows", "state"},
    "keyed_task": CORE
    | {"exchange", "exchanged_rows", "keyed_slices", "state_files", "stopwatch", "task"},
    "keyed_epoch": CORE
    | {"exchange", "fan_out", "keyed_slices", "keyed_task"}
    | {"stopwatch", "task"},
    "gang": CORE | {"exchange", "keyed_slices", "keyed_task", "stopwatch", "task"},
    "local_state": VALUES | {"lmdb_store", "ports", "storage"},
    "option_table": WORDS | {"formats", "sink", "source"},
    "option_page": {"option_table"},
    "options": WORDS | {"formats", "option_table", "source"},
    "write_options": WORDS | {"option_table", "sink"},
    "spark": CORE
    | {
        "codec",
        "exchange",
        "java",
        "job",
        "formats",
        "kafka",
        "options",
        "registry",
        "steps",
        "storage",
    }
    | {"exchanged_rows", "keyed_slices", "keyed_epoch", "keyed_task", "local_state", "task"}
    | {"decision_log", "fan_out", "gang", "handover", "parent_process", "participants"}
    | {"codec", "run", "savepoint_files", "spark_log", "write_options"}
    | {"cache", "early_daemon", "kernel_cache"},
    "metrics": WORDS | {"spark"},
    # What a user writes.
    "endpoints": VALUES | {"formats", "kafka", "option_table", "options"},
    "state_columns": VALUES | {"processors"},
    "state_table": CORE
    | {"endpoints", "newest_committed", "newest_epoch", "ops", "savepoint_files", "savepoints"}
    | {"state_columns", "state_contents", "storage"},
    "kafka_sink": VALUES | {"endpoints", "formats", "kafka", "spark"},
    "explained": CORE
    | {"endpoints", "kafka_sink", "keyed_task", "options", "spark", "steps", "storage"},
    "pipeline": VALUES
    | {"endpoints", "explained", "job", "kafka_sink", "processors", "run", "spark"}
    | {"steps", "task"},
    "__init__": WORDS
    | {"endpoints", "files", "formats", "kafka_sink", "pipeline", "postgres", "run"}
    | {"sink", "source", "spark", "state", "state_table"},
    # What is shipped beside it.
    "testing": WORDS | {"cache", "java", "kafka"},
    "demo": {"__init__", "checkpoint", "testing"},
    "inspection": CORE | {"newest_committed", "newest_epoch", "state_files", "wholeness"},
    "cli_show": CORE | {"inspection", "savepoint_files"},
    "cli_transactions": CORE
    | {"checkpoint_says", "cli_savepoint", "cli_show", "kafka", "settling", "storage"}
    | {"transactions"},
    "cli_inspect": WORDS | {"cli_savepoint", "cli_show", "inspection", "storage"},
    "cli_savepoint": VALUES
    | {
        "checkpoint",
        "cli_show",
        "job",
        "kafka",
        "migration",
        "newest_committed",
        "newest_epoch",
        "ops",
        "savepoints",
        "storage",
    },
    "cli": WORDS | {"cli_inspect", "cli_savepoint", "cli_transactions", "demo", "spark", "testing"},
}

PURE = DECISIONS | {"errors", "topic_partition", "checkpoint", "ports", "spans", "formats"}
PURE |= {"codec", "transactions"}
PURE_MAY_IMPORT = {
    "bisect",
    "collections",
    "contextlib",
    "dataclasses",
    "enum",
    "functools",
    "itertools",
    "json",
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
MAY_PRINT = ("cli.py", "demo/", "__main__.py")

MODULES = sorted(PACKAGE.rglob("*.py"))


def place(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(tree: ast.AST) -> Iterator[str]:
    """Dotted names of everything a module imports; `from a import b` yields `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute: they say where a thing lives"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def parts_imported(tree: ast.AST) -> set[str]:
    """The parts of this package that a module imports; a public name counts as `__init__`."""
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


@pytest.fixture(params=MODULES, ids=place)
def module(request) -> tuple[Path, ast.Module, str]:
    text = request.param.read_text()
    return request.param, ast.parse(text), text


def test_imports_point_one_way(module):
    path, tree, _ = module
    part = part_of(path)
    assert part in MAY_IMPORT, f"{part} is new: say in MAY_IMPORT what it may import"

    strange = parts_imported(tree) - MAY_IMPORT[part] - {part}

    assert not strange, f"{part} must not import {sorted(strange)}"


def test_the_core_touches_nothing_outside(module):
    """No Kafka, Spark, files, clock, threads, chance: so a simulation is the whole truth of it."""
    path, tree, _ = module
    if part_of(path) in PURE:
        names = {name for name in imported(tree) if not name.startswith("urllib.parse.")}
        strange = {name.split(".")[0] for name in names} - PURE_MAY_IMPORT

        assert not strange, f"{part_of(path)} is pure and must not import {sorted(strange)}"


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


def test_only_programs_print(module):
    path, tree, _ = module
    if not any(allowed in place(path) for allowed in MAY_PRINT):
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        names = [call.func.id for call in calls if isinstance(call.func, ast.Name)]

        assert "print" not in names, f"{place(path)} prints"


def test_the_table_names_nothing_that_is_gone():
    """An entry for a part that does not exist would let its successor in unseen."""
    assert set(MAY_IMPORT) == {part_of(path) for path in MODULES}


def test_the_order_has_no_cycles():
    """`__init__` apart, which the demo uses as a user would."""
    done: set[str] = set()
    while left := [part for part in MAY_IMPORT if part not in done]:
        free = [part for part in left if MAY_IMPORT[part] <= done | {part}]
        assert free, f"these import each other: {left}"
        done.update(free)
