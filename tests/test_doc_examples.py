"""The examples of the documentation, run as a reader would type them.

A block that is to run has `<!-- runs -->` above it; one that must be refused says with what:
`<!-- refused: is written a second time -->`. Blocks of Python run one after the other; in others,
each line that begins with `tallystick` is a command. The pages continue each other. Of what they
say only the broker's address and the folder are replaced.
"""

import io
import json
import re
import shlex
from collections.abc import Iterator
from contextlib import redirect_stdout
from itertools import accumulate, count
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.dataset as ds
import pytest
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from tallystick.__main__ import app
from tallystick.testing import EmbeddedKafka
from tests.spark.topics import read_committed

pytestmark = [pytest.mark.broker, pytest.mark.spark]

DOCS = Path(__file__).parent.parent / "docs"
PAGES = (
    "keyed-state.md",
    "windows.md",
    "rescaling.md",
    "savepoints.md",
    "writing-exactly-once.md",
)
_BLOCK = re.compile(
    r"^<!-- (?P<what>runs|refused: (?P<refusal>.+?)) -->\n```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


class Example(NamedTuple):
    """A block of a page.

    Args:
        place: page and line.
        language: `python`, or "" for commands.
        text: what is run.
        refusal: what it must be refused with; "": it must not.
    """

    place: str
    language: str
    text: str
    refusal: str


def examples_of(page: str) -> Iterator[Example]:
    """The blocks of a page that are to run."""
    text = (DOCS / page).read_text()
    for block in _BLOCK.finditer(text):
        line = text.count("\n", 0, block.start("text")) + 1
        yield Example(f"{page}:{line}", block["language"], block["text"], block["refusal"] or "")


class Reader:
    """Types in what the pages say, and remembers what was made."""

    def __init__(self, kafka: EmbeddedKafka, folder: Path) -> None:
        self._replaced = {"localhost:9092": kafka.bootstrap_servers, "/tmp/": f"{folder}/"}
        # As typed into a file that is run: workers get such functions by value.
        self.namespace: dict[str, Any] = {"__name__": "__main__"}
        self.shown = ""

    def read(self, page: str) -> None:
        """Run all of a page."""
        for example in examples_of(page):
            if not example.refusal:
                self._run(example)
                continue
            with pytest.raises(Exception, match=example.refusal):
                self._run(example)

    def _run(self, example: Example) -> None:
        text = example.text
        for original, meant in self._replaced.items():
            text = text.replace(original, meant)
        if example.language == "python":
            shown = io.StringIO()
            with redirect_stdout(shown):
                exec(compile(text, example.place, "exec"), self.namespace)
            self.shown += shown.getvalue()
            return
        for line in text.splitlines():
            if line.startswith("tallystick "):
                self._command(example.place, line)

    def _command(self, place: str, line: str) -> None:
        result = CliRunner().invoke(app, shlex.split(line, comments=True)[1:])
        self.shown += result.output
        assert result.exit_code == 0, f"{place}: {line}\n{result.output}"


def test_the_pages_do_what_they_say(
    shared_spark: SparkSession, tallystick_kafka: EmbeddedKafka, tmp_path: Path
) -> None:
    reader = Reader(tallystick_kafka, tmp_path)
    for page in PAGES:
        assert list(examples_of(page)), f"{page} has no example that runs"
        reader.read(page)

    confluent = tallystick_kafka.confluent_options()
    rows_by_user = by_user(confluent, "best")
    assert {
        user: [(row["number"], row["amount"]) for row in rows_by_user[user]]
        for user in rows_by_user
    } == {user: largest_of(amounts) for user, amounts in ordered(1000).items()}
    assert by_user(confluent, "streaks").keys() == rows_by_user.keys()
    # Ranges of five tasks, then the savepoint.
    assert re.search(r"103 to 127.*monday", reader.shown, re.DOTALL)
    booked = [json.loads(r.value or "") for r in read_committed(confluent, "booked")]
    assert sorted(payment["cents"] for payment in booked) == list(range(600))
    by_account = read_committed(confluent, "by-account")
    assert {r.key for r in by_account} == {f'{{"account":"a{n}"}}' for n in range(5)}
    copied = ds.dataset(tmp_path / "payments-files", format="parquet").to_table()["cents"]
    assert sorted(copied.to_pylist()) == list(range(500, 600))
    reader.namespace.clear()  # with the Kafka client of the page, which would miss its broker


def test_the_page_of_outputs_does_what_it_says(
    shared_spark: SparkSession, tallystick_kafka: EmbeddedKafka, tmp_path: Path
) -> None:
    reader = Reader(tallystick_kafka, tmp_path)
    reader.read("outputs.md")

    confluent = tallystick_kafka.confluent_options()
    possible = [(f"s{i % 6}", 15.0 + i % 17) for i in range(600) if i % 100 != 7]
    shown = {
        topic: [json.loads(r.value or "") for r in read_committed(confluent, topic)]
        for topic in ("highest", "alerts", "complaints", "readings-north", "readings-south")
    }
    assert len(shown["highest"]) == len(possible)
    assert sorted(alert["sensor"] for alert in shown["alerts"]) == sorted(
        sensor for sensor, celsius in possible if celsius > 30
    )
    texts = [complaint["text"] for complaint in shown["complaints"]]
    assert sorted(texts) == sorted(f"s{i % 6} reads -400" for i in range(7, 600, 100))
    assert ds.dataset(tmp_path / "suspect", format="parquet").to_table().num_rows == 6
    hot = ds.dataset(tmp_path / "hot", format="parquet").to_table()
    assert hot.num_rows == sum(celsius > 28 for _, celsius in possible)
    assert ds.dataset(tmp_path / "all", format="parquet").to_table().num_rows == len(possible)
    assert "main output when is_hot" in reader.shown
    for topic, sensors in (
        ("readings-north", {"s0", "s1", "s2"}),
        ("readings-south", {"s3", "s4", "s5"}),
    ):
        assert len(shown[topic]) == 300
        assert {row["sensor"] for row in shown[topic]} == sensors
        assert all(row.keys() == {"sensor", "celsius"} for row in shown[topic])
    reader.namespace.clear()


def test_the_page_of_inputs_does_what_it_says(
    shared_spark: SparkSession, tallystick_kafka: EmbeddedKafka, tmp_path: Path
) -> None:
    reader = Reader(tallystick_kafka, tmp_path)
    reader.read("inputs.md")

    confluent = tallystick_kafka.confluent_options()
    prices = [json.loads(r.value or "") for r in read_committed(confluent, "prices")]
    newest = {row["bidder"]: (row["bids"], row["highest"]) for row in prices}
    of_each = {bidder: [i for i in range(300) if i % 9 == bidder] for bidder in range(9)}
    assert newest == {
        bidder: (2 * len(bidder_prices), max(bidder_prices))
        for bidder, bidder_prices in of_each.items()
    }
    spent = [json.loads(r.value or "") for r in read_committed(confluent, "spent")]
    assert sorted(row["price"] for row in spent) == list(range(300))
    assert {row["name"] for row in spent} <= {None, *(f"person {i}" for i in range(9))}
    assert all(row["price"] % 9 == row["bidder"] for row in spent)
    reader.namespace.clear()


def test_the_page_of_joins_does_what_it_says(
    shared_spark: SparkSession, tallystick_kafka: EmbeddedKafka, tmp_path: Path
) -> None:
    reader = Reader(tallystick_kafka, tmp_path)
    reader.read("joins.md")

    joined = joined_of(tallystick_kafka.confluent_options())
    sums = {(n, n if n % 3 == 0 and n < 60 else None) for n in range(62)}
    assert joined.pop("ratio") >= sums
    assert joined == JOINED
    reader.namespace.clear()


def test_the_page_of_operator_state_does_what_it_says(
    shared_spark: SparkSession, tallystick_kafka: EmbeddedKafka, tmp_path: Path
) -> None:
    reader = Reader(tallystick_kafka, tmp_path)
    reader.read("operator-state.md")

    confluent = tallystick_kafka.confluent_options()
    known, flagged = (
        [json.loads(r.value or "") for r in read_committed(confluent, topic)]
        for topic in ("known", "flagged")
    )
    expected = [n for n in range(300) if n % 25 < 20]
    assert sorted(row["price"] for row in known) == expected
    assert all(row["item"] == f"item {row['auction']}" for row in known)
    above = [n for n in expected if n > 50 * (n % 25 % 4)]
    assert sorted(row["price"] for row in flagged) == above
    lots = [json.loads(r.value or "")["price"] for r in read_committed(confluent, "lots")]
    assert len(lots) == len(set(lots)) >= 280
    assert len(lots) % 10 == 0
    reader.namespace.clear()


JOINED = {
    "paid": {(n, n if n % 3 == 0 else None) for n in range(60)},
    "same-minute": {(n, n) for n in range(0, 60, 3) if (n + 20) // 60 == (n + 25) // 60},
    "in-euro": {
        (n, (0.95 if n >= 30 else 0.9) if n % 2 else (0.08 if n >= 40 else 0.09)) for n in range(60)
    }
    | {(60, 0.95), (61, 0.95)},
    "offers": {("tea", "insert"), ("tea", "delete")},
}
"""What the page about joins puts out: rows of its topics, some of their columns."""


def joined_of(confluent: dict[str, str]) -> dict[str, set[tuple[Any, ...]]]:
    """The same as it is found; rows without a partner come when the watermark has passed them."""
    columns = {
        "paid": ("amount", "receipts_amount"),
        "same-minute": ("amount", "receipts_amount"),
        "in-euro": ("amount", "rate"),
        "offers": ("item", "change"),
        "ratio": ("sold", "received"),
    }
    rows_by_topic = {}
    for topic, names in columns.items():
        rows = [json.loads(record.value or "") for record in read_committed(confluent, topic)]
        rows_by_topic[topic] = {tuple(row.get(name) for name in names) for row in rows}
    return rows_by_topic


def by_user(confluent: dict[str, str], topic: str) -> dict[str, list[dict[str, Any]]]:
    """What stands in an output topic, in the order of each user's rows."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for record in read_committed(confluent, topic):
        row = json.loads(record.value or "")
        rows.setdefault(row["user"], []).append(row)
    return rows


def ordered(order_count: int) -> dict[str, list[int]]:
    """The amounts that each user ordered; as `place_orders` on the page."""
    return {f"u{user}": [i % 50 for i in range(order_count) if i % 7 == user] for user in range(7)}


def largest_of(amounts: list[int]) -> list[tuple[int, float]]:
    """The number and the amount of each order that no earlier one exceeds."""
    highest = accumulate(amounts, max)
    pairs = zip(count(1), amounts, highest, strict=False)
    return [(number, float(amount)) for number, amount, most in pairs if amount == most]
