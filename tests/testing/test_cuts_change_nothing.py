"""However input is cut into epochs, partitions and tasks, a pipeline's rows are the same."""

import random
from collections.abc import Mapping

import pytest

from tallystick.testing import Driver
from tests.testing.compared import CASES, END, END_MS, Case, Kafka, Row, plain, rows_of

PARTITIONS = 3
SEEDS = (1, 2)


def uncut(case: Case, rows: Mapping[str, list[Row]]) -> Driver:
    """One partition, one task, one epoch, and those without records that follow."""
    kafka = Kafka()
    test = Driver(case.make(kafka.source, kafka.sink))
    for topic, of_topic in rows.items():
        test.feed(topic, [*of_topic, {"k": END, "n": 0, "at": END_MS}])
    return test.drain()


def cut(case: Case, rows: Mapping[str, list[Row]], dice: random.Random) -> tuple[Driver, int]:
    """Random pieces, each key in a partition of its own; and some runs are killed, or rescaled."""
    kafka = Kafka()
    pipeline = case.make(kafka.source, kafka.sink)
    partitions = dict.fromkeys(case.inputs, PARTITIONS)
    test = Driver(pipeline, parallelism=dice.randint(1, 4), partitions=partitions)
    remaining = {topic: list(of_topic) for topic, of_topic in rows.items()}
    crashes = 0
    while any(remaining.values()):
        for topic, of_topic in remaining.items():
            count = dice.randint(1, 25)
            for row in of_topic[:count]:
                test.feed(topic, [row], partition=ord(row["k"]) % PARTITIONS)
            del of_topic[:count]
        match dice.randrange(4) if crashes else 0:
            case 0:
                test.crash()
                crashes += 1
            case 1:
                test.restart(parallelism=dice.randint(1, 4))
        assert test.epoch()
    for topic in case.inputs:
        for partition in range(PARTITIONS):
            test.feed(topic, [{"k": END, "n": 0, "at": END_MS}], partition=partition)
    return test.drain(), crashes


@pytest.mark.parametrize("name", CASES)
def test_rows_are_the_same_however_the_input_is_cut(name: str) -> None:
    case = CASES[name]
    for seed in SEEDS:
        dice = random.Random(f"{name} {seed}")
        rows = {topic: rows_of(dice, 60) for topic in case.inputs}
        expected, (test, killed) = uncut(case, rows), cut(case, rows, dice)
        assert killed, "a run is to be killed"
        for output in case.outputs:
            wanted = case.counts(plain(expected.output(output).to_pylist()))
            assert wanted, "there is something to compare"
            assert case.counts(plain(test.output(output).to_pylist())) == wanted, (seed, output)
        records = {output: test.records(topic_of(output, test)) for output in case.outputs}
        assert all(len(table) == len(test.output(name)) for name, table in records.items())


def topic_of(output: str, test: Driver) -> str:
    """Return the topic that an output goes to."""
    topics = {"even": "even", "main": "odd" if test.records("odd").num_rows else "out"}
    return topics[output]
