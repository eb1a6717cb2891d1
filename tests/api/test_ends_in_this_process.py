"""`RowsSource` and `ConsoleSink`: a pipeline of such ends runs here, by `start` as on Spark."""

import contextlib
import io
import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pytest

import tallystick as ts
from tallystick.api import console_sink
from tallystick.api.console_sink import ConsoleTransaction, OpenConsoleSink
from tallystick.api.pipeline import declared
from tallystick.epoch.two_phase import Owner, Place, RunFacts
from tallystick.testing import run

ROWS = [{"user": "a", "n": 1}, {"user": "b", "n": 2}, {"user": "a", "n": 3}]
CONSOLE = ts.ConsoleSink()
KAFKA = ts.KafkaSource("x:1", topics=["t"], value="user string, n bigint")
TO_KAFKA = ts.KafkaSink("x:1", topic="t", value=ts.Json())


def read(rows: Any, **settings: Any) -> ts.Pipeline:
    return ts.Pipeline("p").read(ts.RowsSource(rows, **settings))


def printed(pipeline: ts.Pipeline, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """Run a pipeline to its end; return the text on stdout."""
    assert pipeline.start().awaitTermination(60), "it did not end with its rows"
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize(
    "rows",
    [
        ROWS,
        tuple(ROWS),
        pa.Table.from_pylist(ROWS),
        pa.RecordBatch.from_pylist(ROWS),
        pd.DataFrame(ROWS),
        pl.DataFrame(ROWS),
    ],
    ids=["list", "tuple", "table", "batch", "pandas", "polars"],
)
def test_rows_come_out_in_each_usual_form(rows: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def large(batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch.filter(pc.greater(batch["n"], 1))

    assert printed(read(rows).map_batches(large).write(CONSOLE), capsys) == ROWS[1:]


def test_values_keep_their_types(capsys: pytest.CaptureFixture[str]) -> None:
    at = datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC)
    row = {"f": 0.5, "b": True, "d": at.date(), "t": at, "l": [1, None], "s": {"x": 1}, "e": None}
    seen: list[pa.Schema] = []

    def look(batch: pa.RecordBatch) -> pa.RecordBatch:
        seen.append(batch.schema)
        return batch

    rows = printed(read([row, {**row, "e": "x"}]).map_batches(look).write(CONSOLE), capsys)

    assert rows[0] == {**row, "d": "2026-01-02", "t": "2026-01-02T03:04:05.000006+00:00"}
    kinds = {field.name: str(field.type) for field in seen[0]}
    assert (kinds["f"], kinds["t"]) == ("double", "timestamp[us, tz=UTC]")
    assert "int64" in kinds["l"]


def test_a_schema_casts_and_fills(capsys: pytest.CaptureFixture[str]) -> None:
    pipeline = read([{"n": 1}, {"u": "a"}], schema="u string, n double").write(CONSOLE)

    assert printed(pipeline, capsys) == [{"u": None, "n": 1.0}, {"u": "a", "n": None}]


def test_keyed_steps_windows_joins_and_tables_run(capsys: pytest.CaptureFixture[str]) -> None:
    begin = datetime(2026, 1, 1, tzinfo=UTC)
    at = [{**row, "at": begin + timedelta(seconds=7 * row["n"])} for row in ROWS]
    sums = read(ROWS).key_by("user").process(ts.aggregate({"n": ts.sum("n")})).write(CONSOLE)
    windows = ts.windowed(ts.tumbling("10 seconds"), {"c": ts.count()})
    counted = read(at).key_by("user").process(windows, event_time="at").write(CONSOLE)
    within = {"lower": "-1 second", "upper": "1 second"}
    both = {"left": ts.RowsSource(at), "right": ts.RowsSource(at[:1])}
    joined = (
        ts.Pipeline("p")
        .read(**both)
        .key_by(left="user", right="user")
        .process(
            ts.interval_join("left", "right", **within), event_time={"left": "at", "right": "at"}
        )
        .write(CONSOLE)
    )
    names = ts.broadcast(ts.RowsSource([{"user": "a", "name": "Ann"}]), key="user", uid="names")
    named = (
        read(ROWS)
        .map_batches(ts.enrich(names, on="user"), schema="user string, n bigint, name string")
        .write(CONSOLE)
    )

    assert sorted(row["n"] for row in printed(sums, capsys)) == [2, 4]
    # The end of the rows is the end of event time.
    assert sum(row["c"] for row in printed(counted, capsys)) == 3
    assert [row["user"] for row in printed(joined, capsys)] == ["a"]
    assert [row["name"] for row in printed(named, capsys)] == ["Ann", "Ann"]


def test_a_generator_is_read_as_it_goes_and_ends_the_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    begun = read(({"n": n} for n in range(25_000)), rate=1e9).write(CONSOLE)

    assert [row["n"] for row in printed(begun, capsys)] == list(range(25_000))
    with pytest.raises(ts.OptionError, match="an earlier start has read its generator"):
        begun.start()


def test_a_rate_spreads_rows_over_time(capsys: pytest.CaptureFixture[str]) -> None:
    began_s = time.monotonic()

    assert printed(read(ROWS, rate=10).write(CONSOLE), capsys) == ROWS
    assert time.monotonic() - began_s > 0.2, "there are two tenths of a second in between"


def test_an_endless_generator_runs_until_it_is_stopped(capsys: pytest.CaptureFixture[str]) -> None:
    query = read({"n": n} for n in itertools.count()).write(CONSOLE).start()
    while query.lastProgress is None:
        assert query.isActive
    query.stop(drain=True)
    query.awaitTermination()

    numbers = [json.loads(line)["n"] for line in capsys.readouterr().out.splitlines()]
    assert numbers
    assert numbers == list(range(len(numbers)))


def test_an_error_of_a_generator_comes_after_its_rows(capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> Iterator[dict[str, int]]:
        yield {"n": 1}
        raise ValueError("no more today")

    query = read(broken()).write(CONSOLE).start()
    with pytest.raises(ValueError, match="RowsSource: the iterator: ValueError") as raised:
        query.awaitTermination()

    assert "no more today" in str(raised.value)
    assert capsys.readouterr().out == '{"n": 1}\n'


def test_an_error_of_a_function_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    def broken(batch: pa.RecordBatch) -> pa.RecordBatch:
        raise KeyError("user")

    query = read(ROWS).map_batches(broken).write(CONSOLE).start()
    with pytest.raises(KeyError, match="map_batches broken, rows-0 offsets 0 to 2"):
        query.awaitTermination()


def test_files_are_written_beside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ts.FileSink(tmp_path / "rows")
    printed(read(ROWS).write(CONSOLE, files), capsys)

    assert ds.dataset(tmp_path / "rows").to_table().to_pylist() == ROWS


def test_such_a_pipeline_is_tested_previewed_and_explained_as_others() -> None:
    pipeline = read(ROWS).write(CONSOLE)

    assert run(pipeline, ROWS[:1]).output().to_pylist() == ROWS[:1]
    assert pipeline.preview(ROWS).table.num_rows == 3
    assert "rows of this process" in pipeline.explain()
    assert "in this process, without Spark" in pipeline.explain()


def generator() -> Iterator[dict[str, int]]:
    yield {"n": 1}


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "no rows": (lambda: ts.RowsSource([]), "there are no rows, and so no columns"),
    "no columns": (lambda: ts.RowsSource(pa.table({})), "there are no rows, and so no columns"),
    "no first row": (lambda: read(iter(())).write(CONSOLE).start(), "there are no rows"),
    "another key": (
        lambda: ts.RowsSource([{"a": 1}, {"a": 1, "b": 2}]),
        "row 2 has a column 'b', and the columns are a",
    ),
    "a missing key": (
        lambda: ts.RowsSource([{"a": 1, "b": 2}, {"a": 1}]),
        "row 2 has no 'b', which row 1 has",
    ),
    "schema of another type": (
        lambda: ts.RowsSource([{"a": "x"}], schema="a int"),
        "column 'a' as int32: Could not convert 'x'",
    ),
    "schema of another name": (
        lambda: ts.RowsSource([{"dst": "x"}], schema="dest string"),
        "row 1 has a column 'dst', .* Did you mean 'dest'",
    ),
    "schema beside a table": (
        lambda: ts.RowsSource(pa.table({"x": [1]}), schema="dest string"),
        "column 'dest' is not there",
    ),
    "no type": (lambda: ts.RowsSource([{"a": None}]), "column 'a' is None in every row"),
    "two types": (lambda: ts.RowsSource([{"a": 1}, {"a": "x"}]), "column 'a': Could not convert"),
    "no dicts": (lambda: ts.RowsSource([1]), "row 1 is of type int: expected dicts"),
    "one dict": (lambda: ts.RowsSource({"a": 1}), "expected a list of dicts.*; found dict"),
    "a function": (lambda: ts.RowsSource(generator), r"call it, RowsSource\(generator\(\)\)"),
    "no rate": (lambda: ts.RowsSource(ROWS, rate=0), "expected rows per second, more than 0"),
    "a checkpoint": (
        lambda: read(ROWS).write(CONSOLE).start(checkpoint="/tmp/x"),
        "reads RowsSource, so it runs in this process, .* leave checkpoint out",
    ),
    "a page": (lambda: read(ROWS).write(CONSOLE).start(ui_port=1), "leave ui_port out"),
    "to Kafka with a checkpoint": (
        lambda: read(ROWS).write(TO_KAFKA).start(checkpoint="/tmp/x"),
        "reads RowsSource, so it runs in this process, .* leave checkpoint out",
    ),
    "beside Kafka": (
        lambda: (
            ts.Pipeline("p")
            .read(ts.stream(ts.RowsSource(ROWS), uid="a"), ts.stream(KAFKA, uid="b"))
            .write(CONSOLE)
            .start(checkpoint="/tmp/x")
        ),
        "a RowsSource beside a KafkaSource",
    ),
    "through Spark": (
        lambda: read(ROWS).transform(lambda frame: frame).write(CONSOLE).start(),
        "before step 1, transform: .* here is no Spark",
    ),
    "to recover": (
        lambda: read(ROWS).write(CONSOLE).recover(checkpoint="/tmp/x"),
        "there is no cluster and no checkpoint to look at",
    ),
    "to the doctor": (lambda: declared(read(ROWS).write(CONSOLE)), "there is no cluster"),
    "nowhere": (lambda: read(ROWS).start(), r"write\(sink\) is missing"),
    "no checkpoint on Spark": (
        lambda: ts.Pipeline("p").read(KAFKA).write(CONSOLE).start(),
        r"start\(\): checkpoint= is missing",
    ),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_mistakes_are_answered_in_one_line(mistake: str) -> None:
    make, message = REFUSED[mistake]
    with pytest.raises(ts.OptionError, match=message) as raised:
        make()
    assert "\n" not in str(raised.value)


def test_two_consoles_print_what_each_gets(capsys: pytest.CaptureFixture[str]) -> None:
    first = ts.when(ts.ConsoleSink(), lambda batch: pc.equal(batch["user"], "a"))
    second = ts.when(ts.ConsoleSink(), lambda batch: pc.equal(batch["user"], "b"))

    rows = printed(read(ROWS).write(first, second), capsys)

    assert sorted(row["n"] for row in rows) == [1, 2, 3]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def transaction(count: int, *, is_whole: bool = False) -> ConsoleTransaction:
    place = Place(Owner("p", "console-2", "l"), 7, 0, 0, "ab")
    opened = ConsoleTransaction(place, is_whole=is_whole)
    opened.write(
        pa.record_batch(
            {"n": range(count), "text": [sha256(b"%d" % n).hexdigest() for n in range(count)]}
        )
    )
    return opened


def test_a_terminal_gets_a_table_with_types_and_the_name_of_a_second_sink() -> None:
    stream = Terminal()
    with contextlib.redirect_stdout(stream):
        sink = OpenConsoleSink(console_sink.ConsolePlan())
        (committable,) = transaction(30).prepare()
        sink.commit(committable)
        sink.commit(committable)

    lines = stream.getvalue().splitlines()
    assert lines[0].split() == ["n", "text"]
    assert lines[1].split() == ["bigint", "string"]
    assert lines[-1] == "console-2: 30 rows, the first 20 shown"
    assert len(lines) == 2 + 20 + 1, "once, and 20 rows at most"


def test_a_notebook_gets_html(monkeypatch: pytest.MonkeyPatch) -> None:
    class ZMQInteractiveShell: ...

    shown: list[dict[str, str]] = []
    display = SimpleNamespace(display=lambda data, raw: shown.append(data))
    shell = SimpleNamespace(get_ipython=ZMQInteractiveShell)
    monkeypatch.setitem(sys.modules, "IPython", shell)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    OpenConsoleSink(console_sink.ConsolePlan()).commit(transaction(1).prepare()[0])

    (data,) = shown
    assert data["text/html"].startswith("<table><tr><th>n<br><small>bigint</small></th>")
    assert data["text/html"].endswith("<p>console-2: 1 row</p>")


def test_what_travels_through_a_checkpoint_is_bounded(capsys: pytest.CaptureFixture[str]) -> None:
    bounded, whole = transaction(5_000), transaction(5_000, is_whole=True)
    (few,), (all_of_them,) = bounded.prepare(), whole.prepare()

    assert few.record_count == all_of_them.record_count == 5_000
    assert len(few.details) < 1.4 * console_sink.BYTES_MAX < len(all_of_them.details)
    sink = ts.ConsoleSink().open(Owner("p", "console-2", "l"), RunFacts())
    sink.commit(few)
    output = capsys.readouterr()
    shown = len(output.out.splitlines())
    assert 0 < shown < 1_001
    assert f"console-2: {5_000 - shown} more rows of epoch 7 are not shown" in output.err


def program(tmp_path: Path, text: str) -> tuple[list[str], dict[str, str]]:
    """The command for a program, and an environment without any Java."""
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(text))
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), "HOME": str(Path.home()), "PATH": ""}
    return [sys.executable, str(path)], environment


def test_an_interrupt_ends_a_program_in_order(tmp_path: Path) -> None:
    command, environment = program(
        tmp_path,
        """
        import itertools
        import tallystick as ts

        rows = ts.RowsSource(({"n": n} for n in itertools.count()), rate=100)
        ts.Pipeline("p").read(rows).write(ts.ConsoleSink()).start().awaitTermination()
        """,
    )
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == '{"n": 0}\n'
        assert process.stderr is not None
        process.send_signal(signal.SIGINT)
        rest, errors = process.stdout.read(), process.stderr.read()  # `communicate` passes over
        process.wait(60)  # lines that came with the first one

    assert process.returncode == 130
    assert "p: SIGINT: stopped in order; epoch" in errors
    assert "Traceback" not in errors
    numbers = [json.loads(line)["n"] for line in rest.splitlines()]
    assert numbers == list(range(1, len(numbers) + 1))
