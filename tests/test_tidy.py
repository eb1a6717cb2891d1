"""The architecture, as a test: which layer may import which, and what the pure core may not touch.

A layer is a folder or a top-level module of the package, and `spark/streaming`; of the tools, which
are a distribution of their own in `tools/`, `tools` and each of their folders. A new layer needs an
entry in `MAY_IMPORT`, after all that it may import: that is the moment to think about where it
belongs.
"""

import ast
import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

import tallystick
from tests.rules import of_each

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "tallystick"
TOOLS = ROOT / "tools" / "tallystick_tools"
PACKAGES = {path.name: path for path in (PACKAGE, TOOLS)}
SIMULATOR = ROOT / "tests" / "simulation"
STREAMING = PACKAGE / "spark" / "streaming"
SIMULATED_TOO = {
    STREAMING.parent / "gang" / "inbox.py",
    PACKAGE / "pipeline" / "input_planning.py",
    PACKAGE / "pipeline" / "__init__.py",
    STREAMING.parent / "gang" / "__init__.py",
    STREAMING.parent / "__init__.py",  # looks at PySpark's version
    STREAMING / "__init__.py",  # the same
    STREAMING / "micro_batch.py",
}
"""Modules of Spark's side that touch neither Spark nor Kafka, so that the simulator runs them."""
FUNCTION_LINES_MAX = 70
MODULE_LINES_MAX = 700

# Layer: what its modules import besides itself, directly or through others.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "arguments": {"errors"},
    "values": set(),
    "text": {"errors"},
    "host": {"errors"},
    "codec": {"errors", "arguments", "values", "host"},
    "source": {"errors", "arguments", "values", "text"},
    "state": {"errors", "arguments", "text", "host", "codec"},
    "epoch": {"errors", "arguments", "values", "text", "host", "source", "state"},
}
MAY_IMPORT["ports"] = {*MAY_IMPORT} - {"text"}
MAY_IMPORT["storage"] = {"errors", "host"}
MAY_IMPORT["checkpoint"] = {*MAY_IMPORT} - {"text"}
MAY_IMPORT["kafka"] = MAY_IMPORT["epoch"] - {"state"} | {"codec", "epoch"}
MAY_IMPORT["postgres"] = {"errors", "arguments", "host", "epoch"}
MAY_IMPORT["files"] = {"errors", "arguments", "text", "host", "epoch", "storage"}
MAY_IMPORT["tables"] = {*MAY_IMPORT["files"], "files", "values", "state"}
MAY_IMPORT["delta"] = {*MAY_IMPORT["tables"], "tables"}
MAY_IMPORT["iceberg"] = {*MAY_IMPORT["tables"], "tables"}
MAY_IMPORT["options"] = {*MAY_IMPORT["kafka"], "kafka"}
TABLES = {"tables", "delta", "iceberg"}
MAY_IMPORT["tasks"] = {*MAY_IMPORT} - TABLES - {"storage", "kafka", "postgres", "files", "options"}
MAY_IMPORT["spark"] = {*MAY_IMPORT} - TABLES - {"storage", "postgres", "files", "options"}
MAY_IMPORT["words"] = {"errors", "arguments"}
MAY_IMPORT["run"] = {*MAY_IMPORT["tasks"], "words"}
MAY_IMPORT["expressions"] = {"errors", "arguments", "host", "codec", "state"}
MAY_IMPORT["pipeline"] = {*MAY_IMPORT} - TABLES - {"postgres", "files"}
MAY_IMPORT["spark/streaming"] = {*MAY_IMPORT["pipeline"], "pipeline"}
MAY_IMPORT["ops"] = {*MAY_IMPORT} - (TABLES - {"tables"}) - {"spark/streaming"}
MAY_IMPORT["testing"] = {*MAY_IMPORT} - TABLES - {"spark/streaming", "postgres", "files"}
MAY_IMPORT["api"] = {*MAY_IMPORT}
MAY_IMPORT["queries"] = {*MAY_IMPORT}
MAY_IMPORT["__init__"] = {*MAY_IMPORT}
MAY_IMPORT["tools"] = set()
MAY_IMPORT["tools/chaos"] = {*MAY_IMPORT["ops"], "ops", "testing", "tools"} - {
    "postgres",
    *(TABLES - {"tables"}),
    "spark",
    "run",
    "tasks",
    "expressions",
    "pipeline",
    "words",
}
MAY_IMPORT["tools/demo"] = {*MAY_IMPORT} - {"tools/chaos"}
MAY_IMPORT["__main__"] = {*MAY_IMPORT}

PURE = ("errors", "values", "text", "codec", "source", "state", "epoch", "ports")
NOT_PURE = "state/pyspark/"
"""Runs classes that users wrote against PySpark's API."""
PURE_MAY_IMPORT = {
    "base64",
    "binascii",
    "bisect",
    "collections",
    "contextlib",
    "crc32c",
    "dataclasses",
    "decimal",
    "enum",
    "functools",
    "google",
    "itertools",
    "json",
    "llvmlite",
    "math",
    "msgspec",
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
    "kafka": set(),  # kafka-python: tests compare its codec with ours, and nothing else of it
}
MAY_RUN_BYTES = {
    "pickle": {"spark/gang/messages.py"},  # from a process that has proved the gang's secret
    "cloudpickle": {"spark/gang/messages.py"},
    "serializers": {
        "spark/tasks.py"
    },  # the driver's plans, in the tasks that Spark brought them to
    "_pickle": set(),
    "dill": set(),
    "joblib": set(),
    "jsonpickle": set(),
    "marshal": set(),
    "shelve": set(),
    "yaml": set(),
    "eval": set(),
    "exec": set(),
    "compile": set(),
    "__import__": set(),
    "import_module": {
        "__main__.py",  # the module that the command line names
        "host/kernel_cache.py",
        "spark/early_daemon.py",
        "testing/security.py",
    },
    "os.system": set(),
    "os.popen": set(),
    "shell": set(),
    "allow_pickle": set(),
    "read_pickle": set(),
}
"""What turns bytes or text into code. Nothing from Kafka, storage or the network may come there
(docs/security.md)."""
CACHES_OF_VALUES = {
    "arguments.py": {"parameters"},
    "checkpoint/local/lmdb_environment.py": {"_open", "_looked_s"},  # LMDB's rules for forks
    "codec/avro/reader.py": {"_branches"},
    "codec/avro/writer.py": {"_record_of"},
    "codec/json/flat.py": {"_tree", "flat_of"},
    "codec/json/schema.py": {"parse_shape"},
    "codec/protobuf/reader.py": {"_plan"},
    "codec/protobuf/schema.py": {"_known_files", "messages_of"},
    "codec/protobuf/writer.py": {"_plan"},
    "codec/records/compression.py": {"_codec"},
    "host/java.py": {"probe"},
    "host/forks.py": {"_parents"},
    "kafka/java_settings.py": {"say_passed_over"},
    "kafka/messages.py": {
        *("_decoded_class", "_struct_reader", "_struct_writer", "_value_reader", "_value_writer"),
    },
    "kafka/registry.py": {"_known_in_file", "columns_to_read", "value_writer"},
    "ops/ui/server.py": {"_servers"},  # of the driver; a fork has no thread that serves
    "ops/ui/rendering.py": {"_environment"},
    "tables/background.py": {"_jobs"},  # a fork has no thread of theirs
    "tasks/operator_state.py": {"_lists", "_tables"},
    "tasks/hints.py": {"_silent_batches"},
    "source/subscription.py": {"_matches"},
    "run/console.py": {"_TERMINALS"},  # of the driver, as the next
    "run/query.py": {"RUNNING"},
    "spark/context.py": {"_warned"},
    "spark/gang/gang.py": {"_held_slots"},
    "spark/jvm.py": {"_quiet_users", "_levels"},  # of loggers in the driver's JVM
    "spark/gang/link.py": {"_links"},  # closes them in a fork
    "pipeline/topics.py": {"_warned"},
    "spark/streaming/foreach_batch.py": {"_refused", "_sink_of_run"},  # of the driver
    "pipeline/group_offsets.py": {"COUNTS", "_with_transactions"},
    "spark/streaming/offset_reporter.py": {"_at_end", "_listening", "_runs"},
    "pipeline/listeners.py": {"OBSERVERS", "PIPELINES"},
    "state/pyspark/rows.py": {"_maker"},
    "storage/local_files.py": {"_looked_through"},
}
"""What modules keep as long as their process lives, and a fork gets a copy of. Connections, clients
and files are no such values: two processes that use one get each other's answers. They belong into
a `WorkerCache`, which gives a fork none."""
CACHING = {"cache", "lru_cache"}
CONTAINERS = {
    *("dict", "list", "set", "deque", "defaultdict", "Counter", "OrderedDict", "local"),
    *("SimpleQueue", "Queue", "WeakKeyDictionary", "WeakSet", "WeakValueDictionary"),
}
PATHS_BELOW_A_CHECKPOINT = {
    "FOLDER",
    "METADATA",
    "OFFSETS",
    "COMMITS",
    "SOURCES",
    "SPARKS_STATE",
    "DECIDER",
    "DECISIONS",
    "manifest_path",
}
"""Only `checkpoint/` knows what lies where below one; `epoch/` names the files it describes."""
LISTS_OR_WRITES = {"names", "put", "put_new"}
MAY_PRINT = ("tools/demo/", "__main__.py")

NO_DOCSTRING_BEGINS_WITH = re.compile(
    r"(?:What|Whether|Where|Which|Of|Those|Who|Whose|How|Why|Whom|When|From|That|Until|There|Never"
    r"|As|Asked|Called|Told|Nobody|Somebody|So|Whoever|Whatever) "
)

NO_CLASS_IS_CALLED = re.compile(
    r"_?(?:Told|Heard|Held|Left|Found|Built|Sent|Written|Shown|Known|Kept|Made|Seen|Done"
    r"|[A-Z][a-z]{2,}(?:ed|ing))"
)
"""A bare participle: of what?"""

NOTHING_IS_CALLED = {
    *("its", "each", "found", "left", "made", "asked", "held", "heard", "said", "told"),
}
"""Words that point at a value or tell what was done with it: a variable has the value's noun."""
CALLED_SO_IN_PUBLIC = {
    "aggregate": {"each"},
    "interval_join": {"left"},
    "temporal_join": {"left"},
    "upsert_join": {"left"},
    "window_join": {"left"},
    "CheckFinding": {"found"},  # a key of the doctor's JSON
    "EventTimesFact": {"held"},  # a key of the page's JSON
    "CoKeyedBatch": {"held"},
    "KeyedBatch": {"held"},
}
"""Parameters, fields and methods that users know by such names, by their function or class."""

NOT_FOR_TIME = re.compile(
    r"\bbehind (?:the|its|a|an|each|every|that|it|this|epoch) "
    r"(?:\w+ )?(?:decision|commit|epoch|manifest|fence|question|start|failure|end)\b"
)
"""Behind is for places; for time it is after."""

INIT = "__init__.py"
STUB = PACKAGE / "__init__.pyi"
MODULES = sorted([*PACKAGE.rglob("*.py"), STUB, *TOOLS.rglob("*.py")])


def place(path: Path) -> str:
    if path.is_relative_to(TOOLS):
        return f"tools/{path.relative_to(TOOLS).as_posix()}"
    return path.relative_to(PACKAGE).as_posix()


def layer_of(path: Path) -> str:
    if path.is_relative_to(STREAMING):
        return "spark/streaming"
    if path.is_relative_to(TOOLS):
        return "/".join(("tools", *path.relative_to(TOOLS).parts[:-1]))
    return path.relative_to(PACKAGE).parts[0].partition(".")[0]


def path_of_layer(layer: str) -> Path:
    """Return the module that says what a layer is for: the first of a folder, or the only one."""
    top, *rest = layer.split("/")
    folder = TOOLS.joinpath(*rest) if top == "tools" else PACKAGE / layer
    return folder / INIT if (folder / INIT).exists() else folder.with_suffix(".py")


class Source(NamedTuple):
    """A module's text, read and parsed once for all rules."""

    path: Path
    text: str
    tree: ast.Module
    nodes: tuple[ast.AST, ...]
    """All of the tree, in the order of `ast.walk`."""

    @property
    def place(self) -> str:
        return place(self.path)

    @property
    def layer(self) -> str:
        return layer_of(self.path)


@cache
def source_of(path: Path) -> Source:
    text = path.read_text()  # lazy_loader takes relative imports only
    if path == STUB:
        text = text.replace("from .", "from tallystick.")
    tree = ast.parse(text)
    return Source(path, text, tree, tuple(ast.walk(tree)))


def teardown_module() -> None:
    """Give the trees back: a million objects, in a process that goes on to test Spark."""
    source_of.cache_clear()


def imported(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Dotted names of everything a module imports; `from a import b` yields `a.b`."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute: they say where a thing lives"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def modules_imported(path: Path) -> set[Path]:
    """Return which modules of the package and the tools one imports; the stub for public names."""
    modules: set[Path] = set()
    for name in imported(source_of(path).nodes):
        top, *rest = name.split(".")
        if (package := PACKAGES.get(top)) is not None:
            paths = [package.joinpath(*rest[:depth]) for depth in range(1, len(rest) + 1)]
            files = [
                file for module in paths for file in (module.with_suffix(".py"), module / INIT)
            ]
            files = [file for file in files if file.exists()]
            modules.update(files or [STUB if package == PACKAGE else TOOLS / INIT])
    return modules


@cache
def imports() -> dict[Path, set[Path]]:
    """Return what each module of the package and the tools imports of both."""
    return {path: modules_imported(path) for path in MODULES}


def ways_from(modules: Iterable[Path]) -> dict[Path, list[Path]]:
    """Every module that these import, directly or through others, with a shortest way to it."""
    ways = {path: [path] for path in modules}
    new = deque(ways)
    while new:
        path = new.popleft()
        reached = imports().get(path) or modules_imported(path)
        for module_path in sorted(reached - ways.keys()):
            ways[module_path] = [*ways[path], module_path]
            new.append(module_path)
    return ways


def public(body: list[ast.stmt]) -> Iterator[ast.ClassDef | ast.FunctionDef]:
    """Public classes and functions, and what is public inside of them; overloads say no more."""
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            if not any(ast.unparse(decorator) == "overload" for decorator in node.decorator_list):
                yield node
            if isinstance(node, ast.ClassDef):
                yield from public(node.body)


def docstrings(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, str]]:
    """What has a docstring: modules, classes, functions, and the assignment before a bare text."""
    for node in nodes:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            yield getattr(node, "name", "the module"), ast.get_docstring(node) or ""
        if isinstance(node, ast.Module | ast.ClassDef):
            for named, text in pairwise(node.body):
                is_text = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
                if is_text and isinstance(named, ast.Assign | ast.AnnAssign):
                    yield ast.unparse(named)[:60], str(text.value.value)


of_each_module = of_each(MODULES, place, source_of)


@pytest.mark.parametrize("layer", MAY_IMPORT)
def test_imports_point_one_way(layer):
    """Also through others: what a layer is said not to know, its import does not load either."""
    ways = ways_from(path for path in MODULES if layer_of(path) == layer)
    ways_out = {layer_of(path): way for path, way in ways.items() if layer_of(path) != layer}
    too_many = [
        " > ".join(map(place, way))
        for reached, way in ways_out.items()
        if reached not in MAY_IMPORT[layer]
    ]

    assert not too_many, f"{layer} must not import these, directly or through others"
    assert ways_out.keys() == MAY_IMPORT[layer], f"{layer} may import what it does not need"


@of_each_module
def test_the_core_touches_nothing_outside(module: Source) -> None:
    """No Kafka, Spark, files, clock, threads, chance: so a simulation is the whole truth of it."""
    if module.layer in PURE and not module.place.startswith(NOT_PURE):
        names = {name for name in imported(module.nodes) if not name.startswith("urllib.parse.")}
        strange = {name.split(".")[0] for name in names} - PURE_MAY_IMPORT

        assert not strange, f"{module.layer} is pure and must not import {sorted(strange)}"


@of_each_module
def test_dangerous_imports_stay_where_they_belong(module: Source) -> None:
    for name in imported(module.nodes):
        places = ONLY_HERE.get(name.split(".")[0])

        assert places is None or module.place in places, f"it must not import {name}"


def runs_bytes(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the names of `MAY_RUN_BYTES` that a module imports, calls, or gives as an argument."""
    nodes = tuple(nodes)
    names = {part for name in imported(nodes) for part in name.split(".")}
    for node in nodes:
        match node:
            case ast.Call(func=ast.Name(id=name)):
                names.add(name)
            case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr=name)):
                names |= {f"{owner}.{name}", "" if f"{owner}.{name}" == "re.compile" else name}
        if isinstance(node, ast.Call):
            names |= {keyword.arg for keyword in node.keywords if keyword.arg}
    return names & MAY_RUN_BYTES.keys()


@of_each_module
def test_nothing_from_outside_becomes_code(module: Source) -> None:
    for name in runs_bytes(module.nodes):
        assert module.place in MAY_RUN_BYTES[name], f"it must not use {name}"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("import pickle", {"pickle"}),
        ("from pyspark import cloudpickle as harmless", {"cloudpickle"}),
        ("from pyspark.serializers import CPickleSerializer", {"serializers"}),
        ("eval(text)", {"eval"}),
        ("builtins.exec(text)", {"exec"}),
        ("compile(text, 'a', 'eval')", {"compile"}),
        ("re.compile(text)", set()),
        ("np.load(file, allow_pickle=True)", {"allow_pickle"}),
        ("pd.read_pickle(file)", {"read_pickle"}),
        ("yaml.load(text)\nimport yaml", {"yaml"}),
        ("subprocess.run(text, shell=True)", {"shell"}),
        ("os.system(text)", {"os.system"}),
        ("importlib.import_module(name)", {"import_module"}),
    ],
)
def test_what_becomes_code_is_noticed(text, names):
    assert runs_bytes(ast.walk(ast.parse(text))) == names


def caches_in(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the names under which a module keeps values: functions that do, empty containers."""
    nodes = tuple(nodes)
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names |= {node.name} if CACHING & set(map(last_name, node.decorator_list)) else set()
    for node in (statement for body in bodies_in(nodes) for statement in body):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                names |= {name} if is_container(value) else set()
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                names |= {name} if is_container(value) else set()
    return names


def bodies_in(nodes: Iterable[ast.AST]) -> Iterator[list[ast.stmt]]:
    """The module's own, and those of its classes, whose attributes live as long."""
    yield from (node.body for node in nodes if isinstance(node, ast.Module | ast.ClassDef))


def is_container(value: ast.expr) -> bool:
    match value:
        case ast.Dict(keys=[]) | ast.List(elts=[]):
            return True
        case ast.Call():
            is_empty = not value.args or last_name(value) in ("defaultdict", "deque")
            caches = last_name(value) in CACHING
            return caches or (last_name(value) in CONTAINERS and is_empty)
    return False


def last_name(node: ast.expr) -> str:
    while isinstance(node, ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return ast.unparse(node).rpartition(".")[2]


@of_each_module
def test_what_a_process_keeps_is_nothing_that_a_fork_would_share(module: Source) -> None:
    assert caches_in(module.nodes) == CACHES_OF_VALUES.get(module.place, set()), (
        "a connection, client or file belongs into a WorkerCache; add what holds values only"
    )


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("@lru_cache(maxsize=64)\ndef connections(url): ...", {"connections"}),
        ("@functools.cache\ndef client(): ...", {"client"}),
        ("class A:\n    @cache\n    def client(self): ...", {"client"}),
        ("client = functools.lru_cache(None)(connect)", {"client"}),
        ("_open: dict[str, Link] = {}", {"_open"}),
        ("_open = []", {"_open"}),
        ("_open = collections.defaultdict(list)", {"_open"}),
        ("_open: WeakSet[Link] = WeakSet()", {"_open"}),
        ("_here = threading.local()", {"_here"}),
        ("class A:\n    open = {}", {"open"}),
        ("_idle: WorkerCache[str, Link] = WorkerCache()", set()),
        ("UNITS = {'s': 1}\nNAMES = set(UNITS)", set()),
        ("def f():\n    found = {}", set()),
    ],
)
def test_what_a_process_keeps_is_noticed(text, names):
    assert caches_in(ast.walk(ast.parse(text))) == names


@of_each_module
def test_functions_and_modules_fit_the_reader(module: Source) -> None:
    lines = len(module.text.splitlines())
    assert lines <= MODULE_LINES_MAX, f"{lines} lines"
    for node in module.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1

            assert length <= FUNCTION_LINES_MAX, f"{node.name}: {length} lines"


@of_each_module
def test_public_things_say_what_they_are(module: Source) -> None:
    assert ast.get_docstring(module.tree), "it says nothing"
    for node in public(module.tree.body):
        assert ast.get_docstring(node), f"{node.name} says nothing"


@of_each_module
def test_english_is_plain(module: Source) -> None:
    """Docstrings say what a thing does or is; names of classes and modules are nouns."""
    assert not (match := NOT_FOR_TIME.search(module.text)), f"{match}"
    for name, docstring in docstrings(module.nodes):
        assert not NO_DOCSTRING_BEGINS_WITH.match(docstring), f"{name}: {docstring}"
    for node in module.nodes:
        if isinstance(node, ast.ClassDef):
            assert not NO_CLASS_IS_CALLED.fullmatch(node.name), (
                f"{node.name}: a class is called by a noun, not by a word in -ed or -ing alone"
            )
        if isinstance(node, ast.alias) and node.asname:
            assert len(node.asname) > 1, f"{node.name} as {node.asname}"


def names_given(tree: ast.AST, owner: str = "") -> Iterator[tuple[str, str]]:
    """Each name that a module gives, after the class or function that it is given in.

    Names of variables, parameters, fields, attributes, functions and methods, and those under which
    something is imported.
    """
    for node in ast.iter_child_nodes(tree):
        inner = owner
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield owner, name
            case ast.arg(arg=name) | ast.alias(asname=str(name)):
                yield owner, name
            case ast.ExceptHandler(name=str(name)) | ast.MatchStar(name=str(name)):
                yield owner, name
            case ast.MatchAs(name=str(name)) | ast.MatchMapping(rest=str(name)):
                yield owner, name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield owner, name
                inner = name
            case ast.ClassDef(name=name):
                yield owner, name
                inner = name
        yield from names_given(node, inner)


@cache
def names_of(path: Path) -> set[tuple[str, str]]:
    return set(names_given(source_of(path).tree))


def nameless(names: Iterable[tuple[str, str]]) -> set[str]:
    """Return which of a module's names are of `NOTHING_IS_CALLED`, but for the public ones."""
    return {
        f"{owner}: {name}"
        for owner, name in names
        if name.strip("_") in NOTHING_IS_CALLED and name not in CALLED_SO_IN_PUBLIC.get(owner, ())
    }


@of_each_module
def test_variables_have_the_names_of_things(module: Source) -> None:
    """A reader looks for nouns; `found` may be anything."""
    assert not nameless(names_of(module.path)), "a noun says what the value is"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("found = 1", {": found"}),
        ("def f(left): ...", {"f: left"}),
        ("def f(*its, **told): ...", {"f: its", "f: told"}),
        ("def f(): return [each for each in rows]", {"f: each"}),
        ("class A:\n    held: int = 0", {"A: held"}),
        ("class A:\n    def asked(self): self._said = 1", {"A: asked", "asked: _said"}),
        ("lambda made: 1", {": made"}),
        ("if heard := queue.get(): ...", {": heard"}),
        ("match text:\n    case str(found): ...", {": found"}),
        ("try: ...\nexcept ValueError as told: ...", {": told"}),
        ("from text import words as said", {": said"}),
        ("def interval_join(left, right, made): ...", {"interval_join: made"}),
        ("aggregate(each='epoch').found.left_out()", set()),
    ],
)
def test_a_variable_without_a_noun_is_noticed(text, names):
    assert nameless(names_given(ast.parse(text))) == names


def test_names_that_are_public_are_there():
    """An entry of what is gone would let another one in."""
    given = {pair for path in MODULES for pair in names_of(path)}

    assert {
        (owner, name) for owner, names in CALLED_SO_IN_PUBLIC.items() for name in names
    } <= given


@of_each_module
def test_nobody_else_knows_paths_below_a_checkpoint(module: Source) -> None:
    if module.layer in ("checkpoint", "epoch"):
        return
    for node in module.nodes:
        match node:
            case ast.ImportFrom(module=str(origin), names=imported) if origin.startswith(
                ("tallystick.checkpoint", "tallystick.epoch", "tallystick.state")
            ):
                known = PATHS_BELOW_A_CHECKPOINT & {alias.name for alias in imported}
                assert not known, f"it imports {known} of {origin}"
            case ast.Attribute(attr="FOLDER" | "METADATA" | "DECIDER" | "DECISIONS"):
                raise AssertionError(f"line {node.lineno} names a folder of a checkpoint")
            case ast.Call(func=ast.Attribute(value=target, attr=name)) if (
                name in LISTS_OR_WRITES
                and ast.unparse(target).rpartition(".")[2].strip("_") in ("storage", "checkpoint")
            ):
                raise AssertionError(f"line {node.lineno} calls {name} of a checkpoint")


@of_each_module
def test_the_core_knows_nothing_of_sparks_log(module: Source) -> None:
    """Callers have end offsets of epochs; that Spark's log has them is for `spark/streaming`."""
    if module.layer in ("epoch", "run"):
        assert not re.search(r"SparkLog|spark_log|folder\.log\b", module.text), "it does"


@of_each_module
def test_only_programs_print(module: Source) -> None:
    if not any(allowed in module.place for allowed in MAY_PRINT):
        calls = [node for node in module.nodes if isinstance(node, ast.Call)]
        names = [call.func.id for call in calls if isinstance(call.func, ast.Name)]

        assert "print" not in names, "it prints"


def test_every_public_name_is_where_the_package_looks_for_it():
    for name in tallystick.__all__:
        assert getattr(tallystick, name) is not None, name


def test_the_table_names_nothing_that_is_gone():
    """An entry for a layer that does not exist would let its successor in unseen."""
    assert set(MAY_IMPORT) == {layer_of(path) for path in MODULES}


def test_the_simulator_reaches_neither_kafka_nor_spark():
    """But for modules of Spark's side that do not either."""
    own = sorted(SIMULATOR.glob("*.py"))
    reached = {
        layer_of(path)
        for path in ways_from(own)
        if path.is_relative_to(PACKAGE) and path not in SIMULATED_TOO
    }

    assert {"epoch", "run"} <= reached
    assert not reached & {"kafka", "spark", "spark/streaming", "pipeline", "postgres", "files"}


def test_the_order_has_no_cycles():
    """A layer's row names only rows above it."""
    above: set[str] = set()
    for layer, row in MAY_IMPORT.items():
        assert row <= above, f"{layer} imports {row - above}, which stand below it"
        above.add(layer)


def test_no_two_test_files_have_one_name():
    """Pytest collects only one of them, and tells so at the end of a whole run."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))

    assert {name for name, count in names.items() if count > 1} == set()


def waits_in_silence(tree):
    """Return the lines that end a wait, and do not say what was waited for."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Assert)
        and node.msg is None
        and isinstance(node.test, ast.Compare)
        and ast.unparse(node.test.left) == "time.monotonic()"
    ]


POINTS = re.compile(
    r"\b(?:it|its|that|those|these|them|they|this|one|ones|what|which|whose|there)\b", re.IGNORECASE
)
"""Words that point at a thing without naming it."""


def pointing_share(summary: str) -> float:
    """Return the share of a summary's words that only point."""
    return len(POINTS.findall(summary)) / len(summary.split())


def test_summaries_name_their_subjects_and_objects():
    """A reader who finds a function by a search knows nothing of the sentence before."""
    shares = {}
    for path in MODULES:
        for name, text in docstrings(source_of(path).nodes):
            summary = " ".join(text.split("\n\n")[0].split())
            if len(summary.split()) >= 6:
                shares[f"{place(path)}, {name}: {summary}"] = pointing_share(summary)
    worst = [text for text, share in shares.items() if share > 0.25]
    pointing = [text for text, share in shares.items() if share > 0.20]

    assert worst == []
    assert len(pointing) <= len(shares) * 0.03, pointing
    assert pointing_share("Return what says that it is there.") > 0.5


def test_every_waiting_test_says_what_it_waits_for():
    """Else a failure that comes once in a thousand runs says nothing; see `tests/waiting.py`."""
    silent = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if "assert time.monotonic()" in (text := path.read_text())
        for line in waits_in_silence(ast.parse(text))
    ]

    assert silent == []
    assert waits_in_silence(ast.parse("assert time.monotonic() < deadline")) == [1]
    assert waits_in_silence(ast.parse("assert time.monotonic() < deadline, 'no row'")) == []
