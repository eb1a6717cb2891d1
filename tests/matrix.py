"""A small part of the tests on other versions of Spark, Kafka and Python, and a table of it.

`python -m tests.matrix --list` names the cells; `--cell spark=4.1` runs those with that version,
without it all run. One axis differs at a time from the newest, and the oldest of all and the newest
of all are tried together. Each pair of Python and PySpark has a virtual environment in `.matrix`,
and all share a cache there. Results stay in benchmarks/MATRIX.json, so that cells may run one by
one; the table beside it, MATRIX.md, shows all, and docs/deploying.md a
summary (`python -m tests.generated_pages` writes it there).
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import astuple, dataclass, replace
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from xml.etree import ElementTree

from packaging.utils import canonicalize_name

from tallystick.spark.streaming import PYSPARK_VERSION_MIN
from tallystick.testing.jars import KAFKA_VERSIONS, VERSION_VARIABLE
from tests.dependencies import wanted

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".matrix"
TABLE = ROOT / "benchmarks" / "MATRIX.md"
RESULTS = TABLE.with_suffix(".json")
SPARKS = ("3.5", "4.0", "4.1", "4.2", "4.3")
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
UNTRIED = frozenset({"3.14"})
"""Versions in the matrix of which no cell has run yet: the doctor warns of them."""
PACKAGES = ("newest", "lowest")
"""The newest version of each package that is needed, beside `BESIDE`; the lowest allowed one."""
BESIDE = ("polars", "duckdb", "deltalake", "pyiceberg", "confluent-kafka", "protobuf", "pandas")
"""The packages that users have beside ours: the newest versions of all must resolve together."""
STREAMING_MIN = "{}.{}".format(*PYSPARK_VERSION_MIN)
"""The oldest PySpark for Structured Streaming queries of the user's own."""
INSTALL_TIMEOUT_S = 1_800
RUN_TIMEOUT_S = 1_200
NOTE_LENGTH_MAX = 300


@dataclass(frozen=True)
class Cell:
    """One combination of versions."""

    spark: str
    kafka: str
    python: str
    packages: str = ""

    @property
    def name(self) -> str:
        """The versions, as one word."""
        return "-".join(f"{axis}{version}" for axis, version in vars(self).items() if version)

    @property
    def key(self) -> str:
        """The versions, as the results are kept by them."""
        return "/".join(filter(None, astuple(self)))

    @property
    def venv(self) -> Path:
        """The folder of its virtual environment; brokers are no part of that."""
        return FOLDER / "-".join(
            filter(None, (f"python{self.python}", f"spark{self.spark}", self.packages))
        )


DEFAULT = Cell("4.3", KAFKA_VERSIONS[-1], "3.11")


@dataclass(frozen=True)
class Part:
    """A column of the table: a test, and the oldest PySpark that has what it tries."""

    title: str
    test: str
    spark_min: str = SPARKS[0]

    def is_for(self, cell: Cell) -> bool:
        """True if this cell's PySpark has it."""
        return SPARKS.index(cell.spark) >= SPARKS.index(self.spark_min)


PARTS = (
    Part("broker", "tests/testing/test_embedded_kafka.py::test_the_kafka_that_was_chosen_is_what_"
         "runs"),
    Part("pipeline", "tests/spark/test_pipeline_on_spark.py::test_functions_are_chained_may_drop_"
         "rows_and_the_group_shows_how_far_they_got"),
    Part("keyed", "tests/spark/test_pipeline_loop.py::test_a_keyed_step_goes_on_from_its_state"),
    Part("sinks", "tests/spark/test_sinks_together.py::test_files_and_kafka_hold_the_same"),
    Part("kill", "tests/spark/test_crash_points.py::test_the_same_of_a_pipeline"),
    Part("wheel", "tests/test_wheel.py::test_the_demo_runs_from_the_wheel"),
    Part("differential", "tests/differential", STREAMING_MIN),
    Part("foreachBatch", "tests/spark/test_foreach_batch_sink.py::test_rows_choose_topic_partition_"
         "headers_and_timestamp", STREAMING_MIN),
)  # fmt: skip
REFUSAL = "tests/spark/test_pyspark_versions.py"
"""Run in every cell: what is not for a PySpark is refused there, in words that say what is."""
DEMO = ("-m", "tallystick", "demo", "--records", "3000", "--kills", "1")
COLUMNS = (*(part.title for part in PARTS), "demo")


def cells() -> list[Cell]:
    """Return all cells: the default, each axis varied from it, and two corners."""
    all_cells = [DEFAULT]
    all_cells += [replace(DEFAULT, spark=version) for version in SPARKS]
    all_cells += [replace(DEFAULT, kafka=version) for version in KAFKA_VERSIONS]
    all_cells += [replace(DEFAULT, python=version) for version in PYTHONS]
    all_cells += [replace(DEFAULT, packages=choice) for choice in PACKAGES]
    all_cells += [Cell(SPARKS[at], KAFKA_VERSIONS[at], PYTHONS[at]) for at in (0, -1)]
    return list(dict.fromkeys(all_cells))


def interpreter(version: str) -> Path | None:
    """Return a Python of this version, of pyenv or on the path; None: there is none."""
    on_path = [shutil.which(f"python{version}")]
    built = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    for java in [*built, *filter(None, on_path)]:
        ask = [
            str(java),
            "-c",
            "import ensurepip, ssl, sys; print('%d.%d' % sys.version_info[:2])",
        ]
        answer = subprocess.run(ask, capture_output=True, text=True)
        if answer.stdout.strip() == version:
            return Path(java)
    return None


def build(cell: Cell) -> str | None:
    """Make the cell's virtual environment unless it is there; return why it cannot be made."""
    ready = cell.venv / ".ready"
    if ready.exists():
        return None
    python = interpreter(cell.python)
    if python is None:
        return f"this machine has no Python {cell.python}"
    shutil.rmtree(cell.venv, ignore_errors=True)
    subprocess.run([python, "-m", "venv", cell.venv], check=True)
    pip = [cell.venv / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check"]
    completed = subprocess.run(
        [
            *pip,
            *chosen_packages(cell),
            *("-e", f"{ROOT}[test]", "-e", ROOT / "tools", f"pyspark=={cell.spark}.*"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=INSTALL_TIMEOUT_S,
    )
    if completed.returncode != 0:
        return completed.stdout.strip()[-NOTE_LENGTH_MAX:]
    ready.touch()
    return None


def chosen_packages(cell: Cell) -> list[str]:
    """Return arguments of pip that choose the versions of the packages that are needed."""
    if cell.packages == "newest":
        return ["--upgrade", "--upgrade-strategy", "eager", *BESIDE]
    return ["--constraint", str(lowest(cell))] if cell.packages == "lowest" else []


def lowest(cell: Cell) -> Path:
    """Write the lowest versions that both pyproject.toml allow, but for PySpark's, as uv finds."""
    uv, path = Path(sys.executable).with_name("uv"), FOLDER / "lowest.txt"
    asked = [requirement for requirement in wanted() if requirement.name != "pyspark"]
    solved = subprocess.run(
        [
            *(uv, "pip", "compile", "--quiet", "--no-annotate", "--no-header"),
            *("--resolution", "lowest-direct", "--python-version", cell.python, "-"),
        ],
        input="\n".join([*map(str, asked), f"pyspark=={cell.spark}.*"]),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    path.write_text(direct_pins(solved.stdout, [requirement.name for requirement in asked]))
    return path


def direct_pins(solved: str, names: Iterable[str]) -> str:
    """Return the lines of a solution for these packages; what they need in turn is left open."""
    direct = {canonicalize_name(name) for name in names}
    lines = solved.splitlines(keepends=True)
    return "".join(line for line in lines if canonicalize_name(line.split("==")[0]) in direct)


def run(cell: Cell, columns: list[str]) -> dict[str, str]:
    """Run these columns of a cell; return what came of each of them, and `versions`.

    The demo is first: it compiles the kernels, which the tests would compile one by one.
    """
    python = cell.venv / "bin" / "python"
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tools'}",
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
        VERSION_VARIABLE: cell.kafka,
        "TALLYSTICK_CACHE": str(FOLDER / "cache"),  # archives of other versions push no other out
        "CRASH_KILLS": "TransactionCommitted",
        "TEST_CLASS_ARCHIVE": "none",  # three are kept, and each takes minutes to record
    }

    def said_by(command: tuple[str, ...], log: Path) -> str:
        """What came of a command, with the last line that it printed."""
        code: int | str
        with log.open("w") as output:
            try:
                code = subprocess.run(
                    [python, *command], cwd=ROOT, env=environment, stdout=output,
                    stderr=subprocess.STDOUT, timeout=RUN_TIMEOUT_S,
                ).returncode  # fmt: skip
            except subprocess.TimeoutExpired:
                code = f"none after {RUN_TIMEOUT_S} s"
        last = (log.read_text(errors="replace").strip() or "no output").splitlines()[-1]
        return "passed" if code == 0 else f"failed: {code}: {last[:NOTE_LENGTH_MAX]}"

    report = FOLDER / f"{cell.name}.xml"
    report.unlink(missing_ok=True)
    results = {}
    if "demo" in columns:
        results["demo"] = said_by(DEMO, FOLDER / f"{cell.name}-demo.log")
    tests = [part.test for part in PARTS if part.title in columns and part.is_for(cell)]
    pytest = ("-m", "pytest", "-q", f"--junitxml={report}", REFUSAL, *tests)
    said_by(pytest, FOLDER / f"{cell.name}.log")
    results |= outcomes(cell, report)
    program = "import platform, pyspark; print(platform.python_version(), pyspark.__version__)"
    versions = subprocess.run([python, "-c", program], capture_output=True, text=True).stdout
    refused = [part.title for part in PARTS if not part.is_for(cell)]  # tried in every run
    return {"versions": versions.strip()} | {
        column: results[column] for column in [*columns, *refused]
    }


def outcomes(cell: Cell, report: Path) -> dict[str, str]:
    """Return what came of each part, as pytest's report has it; no report: they failed."""
    cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    outcomes_by_part = {
        part.title: outcome_of(part.test, cases)
        for part in (Part("refusal", REFUSAL), *PARTS)
        if part.is_for(cell)
    }
    refused = (
        "refused" if outcomes_by_part.pop("refusal") == "passed" else "failed: it is not refused"
    )
    return {part.title: outcomes_by_part.get(part.title, refused) for part in PARTS}


def outcome_of(test: str, cases: list[ElementTree.Element]) -> str:
    """Return what came of a test, of all its cases together."""
    path, _, name = test.partition("::")
    module = path.removesuffix(".py").replace("/", ".")
    own = [
        case
        for case in cases
        if (case.get("classname") or "").startswith(module)
        and (case.get("name") or "").partition("[")[0].startswith(name)
    ]
    wrong = [
        element
        for case in own
        for element in case
        if element.tag in ("failure", "error", "skipped")
    ]
    if wrong:
        reason = " ".join((wrong[0].get("message") or wrong[0].tag).split())
        return f"failed: {reason[:NOTE_LENGTH_MAX]}"
    return "passed" if own else "failed: it did not run"


def kept() -> dict[str, dict[str, str]]:
    """Return the results of all cells that ran."""
    results: dict[str, dict[str, str]] = json.loads(RESULTS.read_text())
    return results


def record(cell: Cell, result: dict[str, str]) -> None:
    """Keep a cell's result, and write the table of all that are kept."""
    results = kept()
    known = results.setdefault(cell.key, {})
    known.pop("not built", None)
    known |= {**result, "date": f"{datetime.now(UTC):%Y-%m-%d}"}
    RESULTS.write_text(json.dumps(results, indent=1))
    TABLE.write_text(table(results))


def table(results: dict[str, dict[str, str]]) -> str:
    """Return the page: a row per cell, and a note for each thing that failed."""
    notes: list[str] = []

    def shown(cell: Cell, column: str) -> str:
        result = results.get(cell.key, {})
        outcome = result.get(column, "not run")
        if "not built" in result:
            outcome = f"not built: {result['not built']}"
        short, _, why = outcome.partition(": ")
        if why and (note := f"{cell.name}: {why}") not in notes:
            notes.append(note)
        return f"{short} [{notes.index(note) + 1}]" if why else short

    rows = [
        [*astuple(cell), *(shown(cell, column) for column in COLUMNS), version_of(cell, results)]
        for cell in cells()
    ]
    head = ["PySpark", "Kafka", "Python", "packages", *COLUMNS, "ran with"]
    lines = [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    text = f"""\
# Versions that were tried

Written by `make matrix` (`python -m tests.matrix`): a small part of the tests, on real brokers and
a real Spark of each version, on {machine}. `refused`: Structured Streaming
queries of your own (`format("tallystick")`, `foreachBatch`) need PySpark 4.2, and with an older one
the call says so, which is tested there ([why](../docs/deploying.md#versions)); a `Pipeline` does
not use them. `wheel`: the wheel, installed outside of the repository, runs the demo. `packages`:
as pip resolves them; the newest of all, beside {", ".join(BESIDE)}; or the lowest that are allowed.

{chr(10).join(lines)}

| column | test |
| --- | --- |
"""
    text += "".join(f"| {part.title} | `{part.test}` |\n" for part in PARTS)
    text += f"| demo | `python {' '.join(DEMO)}` |\n"
    listed = "".join(f"{number}. {note}\n" for number, note in enumerate(notes, 1))
    return text + (f"\n## What failed\n\n{listed}" if notes else "")


def summary() -> str:
    """Return the table for docs/deploying.md: versions of an axis with the same result share a row.

    Versions without any result are named below it, and parts that some of the others lack.
    """
    results = kept()
    lines = ["| with | passed | refused | failed |", "| --- | --- | --- | --- |"]
    axes = (("spark", "PySpark", SPARKS), ("kafka", "Kafka", KAFKA_VERSIONS),
            ("python", "Python", PYTHONS), ("packages", "packages", PACKAGES))  # fmt: skip
    remaining: list[str] = []
    for axis, name, versions in axes:
        came = {
            version: by_outcome(results.get(cell.key, {}))
            for version in versions
            for cell in [replace(DEFAULT, **{axis: version})]
        }
        for result, same in groupby(came, came.__getitem__):
            row = f"{name} {', '.join(same)}"
            if any(result):
                lines.append(f"| {row} | {' | '.join(result)} |")
            else:
                remaining.append(row)
    partly = [
        column for column in COLUMNS if any(column not in result for result in results.values())
    ]
    unknown = [f"Nothing ran yet with {'; '.join(remaining)}."] if remaining else []
    if partly:
        unknown.append(f"Parts that did not run with each of the others: {', '.join(partly)}.")
    return "\n".join([*lines, "", " ".join(unknown)] if unknown else lines)


def by_outcome(result: dict[str, str]) -> tuple[str, ...]:
    """Return which parts of a cell passed, were refused, and failed."""
    named = {
        outcome: [column for column in COLUMNS if result.get(column, "").startswith(outcome)]
        for outcome in ("passed", "refused", "failed")
    }
    return tuple(
        "all" if columns == [*COLUMNS] else ", ".join(columns) for columns in named.values()
    )


def version_of(cell: Cell, results: dict[str, dict[str, str]]) -> str:
    """Return the exact versions of Python and PySpark, and the day."""
    result = results.get(cell.key, {})
    python, _, spark = result.get("versions", "").partition(" ")
    return (
        f"PySpark {spark}, Python {python}, {result['date']}" if spark else result.get("date", "")
    )


def main() -> None:
    """Run what is asked for; end with an error if anything failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__)
    parser.add_argument("--list", action="store_true", help="name the cells and run nothing")
    parser.add_argument("--cell", action="append", default=[], metavar="AXIS=VERSION",
                        help="spark=4.1, kafka=3.7.2, python=3.12, packages=lowest")  # fmt: skip
    parser.add_argument("--part", action="append", choices=COLUMNS, help="all, if none is named")
    parser.add_argument("--build", action="store_true", help="only make the environments")
    options = parser.parse_args()
    wanted = dict(choice.split("=", 1) for choice in options.cell)
    chosen = [cell for cell in cells() if wanted.items() <= vars(cell).items()]
    if not chosen:
        sys.exit(f"no cell is {' '.join(options.cell)}; see --list")
    FOLDER.mkdir(exist_ok=True)
    failed = False
    for cell in chosen:
        if options.list:
            print(cell.name)
            continue
        began = time.monotonic()
        problem = build(cell)
        if problem is None and options.build:
            continue
        result = (
            run(cell, options.part or list(COLUMNS)) if problem is None else {"not built": problem}
        )
        record(cell, result)
        failed |= any(outcome.startswith("failed") for outcome in result.values())
        print(cell.name, f"{time.monotonic() - began:.0f} s", json.dumps(result), flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
