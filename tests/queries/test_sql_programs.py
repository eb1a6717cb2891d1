"""Programs in SQL: tables as Flink declares them, and `tallystick sql`."""

import datetime
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tallystick.__main__ import app
from tallystick.errors import OptionError
from tallystick.queries.program import program
from tallystick.testing import run

KAFKA = "'connector' = 'kafka', 'properties.bootstrap.servers' = 'localhost:9092'"
FLIGHTS = f"""
CREATE TABLE flights (
    `dest` STRING NOT NULL, -- where to
    delay DOUBLE, price DECIMAL(10, 2), at TIMESTAMP(3),
    WATERMARK FOR at AS at - INTERVAL '10' SECOND, PRIMARY KEY (dest) NOT ENFORCED
) WITH ({KAFKA}, 'topic' = 'flights', 'format' = 'json',
    'properties.security.protocol' = 'PLAINTEXT');
"""
LATE = f"CREATE TABLE late (s TIMESTAMP(3), n BIGINT) WITH ({KAFKA}, 'topic' = 'late');"
INSERT = """
INSERT INTO late SELECT window.start AS s, count(*) AS n FROM flights WHERE delay > 15
GROUP BY window(at, '1 minute')
"""
BEGIN = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


def test_a_program_is_a_pipeline() -> None:
    rows = [
        {"dest": "ORD", "delay": 20.0, "at": BEGIN + datetime.timedelta(seconds=30 * n)}
        for n in range(10)
    ]
    pipeline = program(f"{FLIGHTS}{LATE}{INSERT};", "job")
    assert pipeline.name == "job"
    windows = run(pipeline, {"flights": as_json(rows)}).output().to_pylist()
    assert [window["n"] for window in windows] == [2, 2, 2, 2]
    assert windows[0]["s"] == BEGIN


def as_json(rows: list[dict[str, Any]]) -> list[dict[str, bytes]]:
    """Rows as records: a program's source has the columns that it reads, and no others."""
    texts = (json.dumps(row, default=lambda at: at.isoformat()) for row in rows)
    return [{"value": text.encode()} for text in texts]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "0 statements beside CREATE"),
        (FLIGHTS + INSERT, "INSERT INTO late: there is no such table, only flights"),
        (FLIGHTS + LATE + INSERT + ";" + INSERT, "INSERT INTO late stands in the text 2 times"),
        (FLIGHTS + LATE + "SELECT dest FROM flights", "expected INSERT INTO table SELECT"),
        ("CREATE TABLE t (a INT);" + INSERT, "expected CREATE TABLE name"),
        (FLIGHTS.replace("'topic'", "'topics'") + LATE + INSERT, "Did you mean 'topic'?"),
        (FLIGHTS.replace("'kafka'", "'kafak'") + LATE + INSERT, "Did you mean 'kafka'?"),
        (FLIGHTS.replace("'json'", "'csv'") + LATE + INSERT, "expected json"),
        (FLIGHTS.replace("'topic' =", "'topic'") + LATE + INSERT, "expected 'option' = 'value'"),
        (FLIGHTS.replace("delay DOUBLE", "delay DOUBLE METADATA") + LATE + INSERT, "METADATA"),
        (
            FLIGHTS.replace("delay DOUBLE", "delay") + LATE + INSERT,
            "expected a column and its type",
        ),
        (
            FLIGHTS.replace("'format'", "'scan.startup.mode' = 'timestamp', 'format'")
            + LATE
            + INSERT,
            "expected one of earliest-offset, latest-offset",
        ),
        (FLIGHTS.replace("kafka'", "print'", 1) + LATE + INSERT, "has no option"),
    ],
)
def test_a_mistake_names_the_table_and_what_is_expected(text: str, words: str) -> None:
    with pytest.raises(OptionError) as caught:
        program(text, "job")
    assert words in str(caught.value)


def test_the_command_explains_and_asks_for_a_checkpoint(tmp_path: Path) -> None:
    file = tmp_path / "per-minute.sql"
    file.write_text(FLIGHTS + LATE + INSERT)

    shown = CliRunner().invoke(app, ["sql", str(file), "--explain"])
    assert shown.exit_code == 0
    assert shown.output.startswith("pipeline         per-minute")

    refused = CliRunner().invoke(app, ["sql", str(file)])
    assert refused.exit_code != 0
    assert "needs --checkpoint FOLDER" in refused.output


def test_signs_of_comments_in_a_text_are_text() -> None:
    """One that was cut at `--` would compare with another text, or end the statement."""
    text = "INSERT INTO late SELECT at AS s, 1 AS n FROM flights /* all */ WHERE dest = 'a--b/*c*/'"
    rows = [{"dest": dest, "delay": 1.0, "at": BEGIN} for dest in ("a", "a--b/*c*/", "a--b")]
    pipeline = program(f"{FLIGHTS}{LATE}{text} -- the end", "job")
    assert run(pipeline, {"flights": as_json(rows)}).output().num_rows == 1


def test_a_prefix_of_transactional_ids_is_the_sinks() -> None:
    late = LATE.replace("'late'", "'late', 'sink.transactional-id-prefix' = 'team-'")
    (sink,) = program(FLIGHTS + late + INSERT, "job").sinks
    assert sink.transactional_id_prefix == "team-"


def test_without_the_parser_the_extra_is_named() -> None:
    code = (
        "import sys; sys.modules['sqlglot'] = None; import tallystick as ts\n"
        "try:\n    ts.sql('SELECT 1')\nexcept ts.OptionError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("expressions need sqlglot: pip install ")
    assert "[sql]" in done.stdout


def test_files_and_the_console_are_sinks() -> None:
    for options in ("'connector' = 'filesystem', 'path' = '/tmp/late'", "'connector' = 'print'"):
        text = f"{FLIGHTS}CREATE TABLE late (s TIMESTAMP(3), n BIGINT) WITH ({options});{INSERT}"
        (sink,) = program(text, "job").sinks
        assert type(sink).__name__ in ("FileSink", "ConsoleSink")


@pytest.mark.parametrize(
    ("select", "columns"),
    [
        ("SELECT at, 1 FROM flights WHERE Delay > 1", "`delay` double, `at` timestamp"),
        ("SELECT at, count(*) FROM flights GROUP BY at", "`at` timestamp"),
        (
            "SELECT at, CAST(delay * 2 AS bigint) AS n FROM flights",
            "`delay` double, `at` timestamp",
        ),
        (
            "SELECT f.at, 1 AS n FROM (SELECT * FROM flights) f",
            "`dest` string, `delay` double, `price` decimal(10, 2), `at` timestamp",
        ),
    ],
)
def test_columns_that_nobody_reads_are_not_parsed(select: str, columns: str) -> None:
    pipeline = program(f"{FLIGHTS}{LATE}INSERT INTO late {select}", "job")
    ((_, rows),) = pipeline.inputs.streams
    assert rows.source.value.schema == columns
    assert ("metadata.columns" in rows.source.options) == ("dest" not in columns)


def test_kafkas_own_columns_are_there_if_they_are_named() -> None:
    insert = "INSERT INTO late SELECT at, `offset` FROM flights"
    rows = [{"dest": "ORD", "delay": 1.0, "at": BEGIN}] * 2
    pipeline = program(f"{FLIGHTS}{LATE}{insert}", "job")
    assert run(pipeline, {"flights": as_json(rows)}).output()["n"].to_pylist() == [0, 1]
