"""Tools of the examples: flights into a topic, and a topic read by confluent-kafka alone."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
from confluent_kafka import Consumer, Producer

if TYPE_CHECKING:
    from tests.postgres.real_postgres import PostgresServer

WAIT_S = 60.0


def write(servers: str, topic: str, rows: pd.DataFrame, key: str) -> None:
    """Write rows as JSON; records with the same key go to the same partition, in order."""
    producer = Producer({"bootstrap.servers": servers, "enable.idempotence": True})
    values = rows.to_json(orient="records", lines=True).splitlines()
    for name, value in zip(rows[key].astype(str), values, strict=True):
        producer.produce(topic, value, name)
    if producer.flush(WAIT_S):
        raise TimeoutError(f"{topic} did not take all records within {WAIT_S:.0f} s")


def read(servers: str, topic: str) -> list[dict[str, object]]:
    """Return the JSON values of all committed records, in the order of each partition."""
    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": "examples",
            "isolation.level": "read_committed",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
        }
    )
    ends_left = len(consumer.list_topics(topic, WAIT_S).topics[topic].partitions)
    consumer.subscribe([topic])
    rows: list[dict[str, object]] = []
    while ends_left:
        message = consumer.poll(WAIT_S)
        if message is None:
            raise TimeoutError(f"{topic} could not be read to its end within {WAIT_S:.0f} s")
        if message.error() is None:
            rows.append(json.loads(message.value()))
        else:
            ends_left -= 1  # the end of one partition is the only "error" that is asked for
    consumer.close()
    return rows


def check(name: str, actual: object, expected: object) -> None:
    """Print whether both are equal, and end the program with exit code 1 if not."""
    if actual != expected:
        sys.exit(f"{name}: WRONG\nfound {actual}\nexpected {expected}")
    print(f"{name}: as expected")


def postgres() -> "PostgresServer":
    """Start a PostgreSQL for the example, as the tests do."""
    sys.path.append(str(Path(__file__).parents[1]))
    from tests.postgres.real_postgres import PostgresServer

    return PostgresServer()
