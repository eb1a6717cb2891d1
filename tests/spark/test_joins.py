"""Joins in pipelines, on Spark and a real broker, over restarts at other parallelisms."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import tallystick as ts
from tallystick.testing import EmbeddedKafka
from tests.spark.flow import Flow
from tests.spark.topics import produce, read_committed

pytestmark = [pytest.mark.broker, pytest.mark.spark]

REACH_MS = 150_000
PHASE_MS = 100_000
BEGIN_MS = 1_700_000_000_000
Row = tuple[int, int, int]


@pytest.fixture
def flow(tallystick_kafka: EmbeddedKafka, spark: SparkSession, tmp_path: Path) -> Flow:
    return Flow(tallystick_kafka, spark, tmp_path)


def fed(flow: Flow, topic: str, names: tuple[str, str], rows: list[Row]) -> list[Row]:
    """Rows (key, number, ms) as JSON; returns them."""
    key, at = names
    values = [(str(k), json.dumps({key: k, "n": n, at: ms})) for k, n, ms in rows]
    produce(flow.confluent, topic, values)
    return rows


def rows_of(flow: Flow) -> list[dict[str, Any]]:
    rows = read_committed(flow.confluent, flow.topic_out)
    return [json.loads(row.value or "") for row in rows]


def nested_loops(orders: list[Row], payments: list[Row]) -> Iterator[tuple[Any, ...]]:
    """Each pair (key, order, payment), and the rows without a partner."""
    paired = set()
    for order in orders:
        for payment in payments:
            if order[0] == payment[0] and 0 <= payment[2] - order[2] <= REACH_MS:
                paired |= {("order", order), ("payment", payment)}
                yield order[0], order[1], payment[1]
    yield from ((o[0], o[1], None) for o in orders if ("order", o) not in paired)
    yield from ((p[0], None, p[1]) for p in payments if ("payment", p) not in paired)


@pytest.mark.parametrize("columns", [None, {"orders": ["n", "offset"], "payments": ["n"]}])
def test_an_interval_join_is_exact_over_restarts_at_other_parallelisms(
    flow: Flow, columns: dict[str, list[str]] | None
) -> None:
    """Payments come in the phase after their orders: what joins them is state that moved."""
    paid = f"{flow.name}-payments"
    flow.kafka.create_topic(paid, 2)
    pipeline = ts.Pipeline(flow.name).read(
        orders=flow.source(value=ts.Json("id bigint, n bigint, at bigint")),
        payments=flow.source(topics=[paid], value=ts.Json("of bigint, n bigint, on bigint")),
    )
    orders: list[Row] = []
    payments: list[Row] = []

    def run(parallelism: int, more_orders: list[Row], more_payments: list[Row]) -> None:
        orders.extend(fed(flow, flow.topic_in, ("id", "at"), more_orders))
        payments.extend(fed(flow, paid, ("of", "on"), more_payments))
        reach = {"lower": 0, "upper": f"{REACH_MS} milliseconds"}
        function = ts.interval_join("orders", "payments", **reach, how="full", columns=columns)
        joined = (
            pipeline.key_by(orders="id", payments="of")
            .process(
                function,
                event_time={"orders": "at", "payments": "on"},
                uid="paid",
                parallelism=parallelism,
            )
            .write(flow.sink(key="id", value=ts.Json()))
        )
        flow.run(joined)

    for phase, parallelism in enumerate((2, 3, 1)):
        begin = BEGIN_MS + phase * PHASE_MS
        numbers = range(phase * 60, phase * 60 + 60)
        run(
            parallelism,
            [(n % 20, n, begin + n % 60 * 1000) for n in numbers],
            [(n % 23, n, begin + n % 60 * 1500 + 7) for n in numbers],
        )
        pairs = {(k, o, p) for k, o, p in nested_loops(orders, payments) if None not in (o, p)}
        shown = [(row["id"], row.get("n"), row.get("payments_n")) for row in rows_of(flow)]
        assert len(shown) == len(set(shown)), "none twice"
        assert pairs == {row for row in shown if None not in row}, "as soon as both are there"
    assert any(p - o >= 60 for _, o, p in pairs), "of one phase and the next"

    (names,) = {tuple(row) for row in rows_of(flow)}
    of_both = ("id", "n", "at", "of", "payments_n", "on")
    assert names == (of_both if columns is None else ("id", "n", "offset", "payments_n"))
    assert flow.spark is not None
    state_schema = ts.read_state(flow.spark, str(flow.checkpoint)).schema
    waiting = set(
        state_schema["left"].dataType.elementType.names
    )  # beside what a join keeps of each row
    assert {"n"} <= waiting
    assert waiting.isdisjoint({"topic", "partition", *(["at"] if columns else ["offset"])})

    later = BEGIN_MS + 1000 * PHASE_MS
    run(2, [(-1, -1, later)], [])
    run(3, [(-1, -2, later + 1)], [])
    shown = [(row["id"], row.get("n"), row.get("payments_n")) for row in rows_of(flow)]
    expected = [row for row in nested_loops(orders, payments) if row[0] != -1]
    assert sorted(map(str, shown)) == sorted(map(str, expected))


def test_an_upsert_join_with_another_order_is_refused_at_the_start(flow: Flow) -> None:
    """Versions of one order would be compared with those of another: no update would count."""
    prices = f"{flow.name}-prices"
    flow.kafka.create_topic(prices, 1)

    def run(price: int, how: str = "inner", **arguments: Any) -> list[tuple[str, int]]:
        row = {"item": 1, "price": price, "version": price, "changed": 10**12 + price}
        produce(flow.confluent, prices, [("1", json.dumps(row))])
        pipeline = ts.Pipeline(flow.name).read(
            stock=flow.source(value=ts.Json("item bigint, count bigint, gone boolean")),
            prices=flow.source(
                topics=[prices],
                value=ts.Json("item bigint, price bigint, version bigint, changed bigint"),
            ),
        )
        flow.run(
            pipeline.key_by(stock="item", prices="item")
            .process(ts.upsert_join("stock", "prices", how=how, **arguments), uid="offers")
            .write(flow.sink(key="item", value=ts.Json()))
        )
        return [(row["change"], row["price"]) for row in rows_of(flow)]

    produce(flow.confluent, flow.topic_in, [("1", json.dumps({"item": 1, "count": 5}))])
    as_it_was = {"newest_by": {"prices": "changed"}, "deleted": {"stock": "gone"}}
    assert run(1, **as_it_was) == [("insert", 1)]
    for other, message in (
        (
            {"newest_by": {"prices": "version"}},
            r'newest_by\["prices"\] is now "version", .*"changed"',
        ),
        ({"newest_by": {}}, r'newest_by\["prices"\] is now the order of arrival'),
        ({"deleted": {}}, r'deleted\["stock"\] is now no column, .* with "gone"'),
        ({"how": "left"}, 'how is now "left", .* with "inner"'),
    ):
        with pytest.raises(ts.OptionError, match=f"step offers: {message}") as refused:
            run(2, **(as_it_was | other))
        assert "allow_dropped_state=['offers']" in str(refused.value)
        assert [(row["change"], row["price"]) for row in rows_of(flow)] == [("insert", 1)]
    assert run(3, **as_it_was) == [("insert", 1), ("update", 3)]
