"""Several INSERT INTO in one program: its outputs, or a refusal with the remedy."""

import datetime
import json
from typing import Any

import pytest

import tallystick as ts
from tallystick.errors import OptionError
from tallystick.queries.program import program
from tallystick.testing import Driver, run

KAFKA = "'connector' = 'kafka', 'properties.bootstrap.servers' = 'localhost:9092'"
TABLES = f"""
CREATE TABLE flights (dest STRING, delay DOUBLE, at TIMESTAMP(3),
    WATERMARK FOR at AS at - INTERVAL '10' SECOND) WITH ({KAFKA}, 'topic' = 'flights');
CREATE TABLE late (dest STRING, hours DOUBLE) WITH ({KAFKA}, 'topic' = 'late');
CREATE TABLE early (dest STRING) WITH ({KAFKA}, 'topic' = 'early');
"""
LATE = "INSERT INTO late SELECT dest, delay / 60 FROM flights WHERE delay > 15;\n"
EARLY = "INSERT INTO early SELECT upper(f.dest) AS city FROM flights f WHERE f.delay < 0;\n"
BEGIN = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
ROWS = [
    {"dest": f"d{n}", "delay": 30.0 * (n - 2), "at": BEGIN + datetime.timedelta(seconds=40 * n)}
    for n in range(5)
]
COUNTS = """
CREATE VIEW per_minute AS SELECT dest, count(*) AS n, window_start FROM
    TABLE(TUMBLE(TABLE flights, DESCRIPTOR(at), INTERVAL '1' MINUTE))
    GROUP BY dest, window_start, window_end;
"""


def values(pipeline: ts.Pipeline, topic: str) -> list[str]:
    rows = run(pipeline, {"flights": as_json(ROWS)}).records(topic)
    return sorted(value.decode() for value in rows["value"].to_pylist())


def as_json(rows: list[dict[str, Any]]) -> list[dict[str, bytes]]:
    """Rows as records: a program's source has the columns that it reads, and no others."""
    texts = (json.dumps(row, default=lambda at: at.isoformat()) for row in rows)
    return [{"value": text.encode()} for text in texts]


@pytest.mark.parametrize(
    "around",
    [
        "{}",
        "EXECUTE STATEMENT SET BEGIN {} END;",
        "BEGIN STATEMENT SET; {} END;",
        "-- both\nBEGIN STATEMENT SET; {} END",
    ],
)
def test_each_output_has_rows_and_columns_of_its_own(around: str) -> None:
    pipeline = program(TABLES + around.format(LATE + EARLY), "job")
    assert values(pipeline, "late") == ['{"dest":"d3","hours":0.5}', '{"dest":"d4","hours":1}']
    assert values(pipeline, "early") == ['{"dest":"D0"}', '{"dest":"D1"}']


def test_outputs_of_one_view_share_its_state() -> None:
    inserts = (
        "INSERT INTO late SELECT dest, CAST(n AS double) FROM per_minute WHERE dest <> 'd0';"
        "INSERT INTO early SELECT dest FROM per_minute WHERE n = 1 AND dest < 'd2';"
    )
    pipeline = program(TABLES + COUNTS + inserts, "job")
    assert [step.uid for step in pipeline.steps if hasattr(step, "uid")] == ["per_minute"]
    assert values(pipeline, "early") == ['{"dest":"d0"}', '{"dest":"d1"}']
    assert '{"dest":"d1","hours":1}' in values(pipeline, "late")


def test_ts_sql_takes_them_too() -> None:
    flights = ts.KafkaSource(
        "localhost:9092", topics=["flights"], value=ts.Json("dest string, delay double")
    )
    sinks = {
        name: ts.KafkaSink("localhost:9092", topic=name, value=ts.Json())
        for name in ("late", "early")
    }
    text = f"EXECUTE STATEMENT SET BEGIN {LATE.replace('60', '60 AS hours')} {EARLY} END;"
    pipeline = ts.sql(text, sinks=sinks, flights=flights)
    rows = [{"dest": row["dest"], "delay": row["delay"]} for row in ROWS]
    records = run(pipeline, {"flights": rows}).records("late")
    assert records.num_rows == 2


PLANES = f"""
CREATE TABLE planes (tail STRING, seats BIGINT) WITH ({KAFKA}, 'topic' = 'planes');
CREATE TABLE large (tail STRING) WITH ({KAFKA}, 'topic' = 'large');
CREATE TABLE small (tail STRING, half DOUBLE) WITH ({KAFKA}, 'topic' = 'small');
CREATE VIEW known AS SELECT upper(tail) AS t, seats FROM planes WHERE seats IS NOT NULL;
INSERT INTO large SELECT t FROM known k WHERE k.seats > 100;
INSERT INTO small SELECT t, seats / 2 FROM known WHERE seats <= 100;
"""


@pytest.mark.parametrize("crashes", [False, True])
def test_outputs_of_different_tables_are_one_pipeline(crashes: bool) -> None:
    driver = Driver(program(TABLES + PLANES + LATE + EARLY, "job"))
    planes = [{"tail": f"n{n}", "seats": n * 60 if n else None} for n in range(4)]
    driver.feed("flights", as_json(ROWS))
    driver.feed("planes", as_json(planes))
    if crashes:
        driver.crash()
    driver.drain()

    def written(topic: str) -> list[str]:
        return sorted(value.decode() for value in driver.records(topic)["value"].to_pylist())

    assert written("large") == ['{"tail":"N2"}', '{"tail":"N3"}']
    assert written("small") == ['{"tail":"N1","half":30}']
    assert written("late") == ['{"dest":"d3","hours":0.5}', '{"dest":"d4","hours":1}']
    assert written("early") == ['{"dest":"D0"}', '{"dest":"D1"}']


@pytest.mark.parametrize(
    ("inserts", "words"),
    [
        (LATE + LATE, "INSERT INTO late stands in the text 2 times"),
        (
            COUNTS + LATE + "INSERT INTO early SELECT dest FROM per_minute",
            "INSERT INTO early reads per_minute, and others read other rows",
        ),
        (
            LATE + "INSERT INTO early SELECT dest FROM flights GROUP BY dest",
            "INSERT INTO early: GROUP BY or an aggregate: beside other INSERT INTO, a query has "
            "FROM, WHERE and expressions alone: write what they share into CREATE VIEW",
        ),
        (LATE + "INSERT INTO early SELECT DISTINCT dest FROM flights", "early: DISTINCT: beside"),
        (
            LATE + "INSERT INTO early SELECT f.dest FROM flights f JOIN flights g ON f.at = g.at",
            "early: JOIN: beside",
        ),
        (
            LATE + "INSERT INTO early WITH a AS (SELECT dest FROM flights) SELECT dest FROM a",
            "early: WITH: beside",
        ),
        (
            LATE + "INSERT INTO early SELECT dest FROM flights UNION ALL SELECT dest FROM flights",
            "early: UNION: beside",
        ),
        (LATE + "INSERT INTO early (SELECT dest FROM flights)", "early: a query in brackets: bes"),
        (LATE + "INSERT INTO early SELECT 'x' AS dest", "early: no FROM: beside"),
        (LATE.replace("delay / 60", "delay, at"), "has 3 columns (dest, delay, at), and the table"),
        (
            LATE.replace("dest, delay / 60", "delay AS hours, dest"),
            "they go by their place, so name them in that order",
        ),
        (
            "CREATE VIEW totals AS SELECT dest, sum(delay) AS d FROM flights GROUP BY dest;"
            "INSERT INTO late SELECT dest, d FROM totals WHERE d > 1;"
            "INSERT INTO early SELECT dest FROM totals",
            "WHERE around a GROUP BY without a window",
        ),
    ],
)
def test_what_one_pipeline_cannot_do_is_refused(inserts: str, words: str) -> None:
    with pytest.raises(OptionError) as caught:
        program(TABLES + inserts, "job")
    assert words in str(caught.value)
