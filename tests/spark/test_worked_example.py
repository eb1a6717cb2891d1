"""The worked example of docs/how-an-epoch-works.md: what the page shows is what a run leaves."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from pyspark.sql import SparkSession

import tallystick as ts
from tallystick.testing import EmbeddedKafka
from tests.spark.topics import read_committed, read_group_offsets

pytestmark = [pytest.mark.broker, pytest.mark.spark]

PAGE = (Path(__file__).parents[2] / "docs" / "how-an-epoch-works.md").read_text()
_BLOCK = re.compile(
    r"^<!-- (?P<what>file|requests|output)(?:: (?P<name>\S+))? -->\n```\w*\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_PIPELINE = re.compile(r"```python\n(pipeline = .*?)```", re.DOTALL)
_VARIES = re.compile(
    r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"  # lineage
    r"|(?<=-seed)[0-9a-f]+|(?<=-)[0-9a-f]{16}|\b[0-9a-f]{16}\b"  # names of attempts
    r"|\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00"  # times
    r'|(?:^|(?<="))[\w-]{22}(?="|$)'  # cluster, topics
)


def blocks(what: str) -> Iterator[re.Match[str]]:
    return (block for block in _BLOCK.finditer(PAGE) if block["what"] == what)


def shown(value: Any, key: str = "") -> Any:
    """As the page has it: what differs from run to run is an ellipsis."""
    match value:
        case dict():
            return {name: shown(member, name) for name, member in value.items()}
        case list():
            return [shown(member) for member in value]
        case str():
            return _VARIES.sub("…", value)
        case _:
            return "…" if key == "checksum" else value


@pytest.fixture
def kafka() -> Iterator[EmbeddedKafka]:
    """A broker of its own: on a shared one there may be such topics, and producers before ours."""
    with EmbeddedKafka() as running:
        yield running


def test_the_worked_example_is_what_happens(
    shared_spark: SparkSession, kafka: EmbeddedKafka, tmp_path: Path
) -> None:
    confluent = kafka.confluent_options()
    kafka.create_topic("orders", 2)
    kafka.create_topic("totals", 2)
    code = _PIPELINE.search(PAGE)
    assert code is not None
    servers = kafka.bootstrap_servers
    text = code[1].replace("localhost:9092", servers).replace("/tmp/totals", str(tmp_path))
    text = text.replace(".start(", ".start(spark, ")

    place(kafka, (0, "ann", 5), (0, "bob", 7), (1, "ann", 3), (1, "cleo", 2))
    exec(text, {"ts": ts, "spark": shared_spark})

    files = list(blocks("file"))
    assert len(files) == 3
    for block in files:
        (path,) = tmp_path.glob(block["name"])
        content = json.JSONDecoder().raw_decode(path.read_text())[0]
        assert shown(content) == json.loads(block["text"]), path
    (requests,) = blocks("requests")
    for group, topic in (("tallystick-totals-token", "totals"), ("tallystick-totals", "orders")):
        line = next(line for line in requests["text"].splitlines() if f" {group} " in line)
        content = sorted(read_group_offsets(confluent, group).items())
        assert re.findall(r"(\w+-\d) = (\d+)", line) == [
            (f"{topic}-{partition}", str(offset)) for (_, partition), (offset, _) in content
        ]
        assert {at for (at, _), _ in content} == {topic}
        metadata = shown(content[0][1][1]).replace(str(tmp_path), "…")
        assert metadata in line, metadata
    first, second = (block["text"].splitlines() for block in blocks("output"))
    assert output(confluent) == first

    place(kafka, (0, "ann", 10), (1, "bob", 1))
    exec(text, {"ts": ts, "spark": shared_spark})

    assert output(confluent) == sorted(first + second)
    (path,) = tmp_path.glob("tallystick/000000000002-*.json")
    manifest = json.JSONDecoder().raw_decode(path.read_text())[0]
    assert manifest["producer"]["producer_epoch"] == 3
    assert manifest["base_path"].startswith("tallystick/000000000001-1-")
    assert [file["rows"] for file in manifest["state"][0]["files"]] == [1, 2, 2]
    assert json.loads(manifest["sources"][0])["topics"] == {"orders": [3, 3]}


def place(kafka: EmbeddedKafka, *orders: tuple[int, str, int]) -> None:
    """Write orders as (partition, user, amount)."""
    producer = Producer(kafka.confluent_options())
    for partition, user, amount in orders:
        value = json.dumps({"user": user, "amount": amount})
        producer.produce("orders", value=value, partition=partition)
    assert producer.flush(30) == 0


def output(confluent: dict[str, str]) -> list[str]:
    """The committed records, a line each."""
    return [
        f"totals-{record.partition}   {record.offset}   {record.value}"
        for record in read_committed(confluent, "totals")
    ]
