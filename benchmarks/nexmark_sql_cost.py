"""The CPU time of Nexmark's queries as SQL texts beside the pipelines written by hand.

    python benchmarks/nexmark_sql_cost.py [--queries q0,q5] [--events 400000] [--rounds 5]

Both run in this process, without Spark and Kafka, on the same JSON records, an epoch for each
100,000 events. Printed is the best of the rounds, which take turns, and the time by hand over that
of the text. CPU times are of the whole process: other load does not count.
"""

import argparse
import time
from collections.abc import Callable

import tallystick_nexmark
from harness.nexmark_events import AUCTIONS, BIDS, PERSONS, events, json_of
from harness.nexmark_sql import script

import tallystick as ts
from tallystick.queries.program import program
from tallystick.testing import Driver

QUERIES = ("q0", "q1", "q2", "q5", "q7", "q8", "q11", "q12")
SEED, EPOCH_EVENTS, RECORDS_MAX = 7, 100_000, 10**9


def by_hand(query: str) -> ts.Pipeline:
    """Return the pipeline of the benchmark."""
    topics = tallystick_nexmark.Topics("localhost:9092", "", "results", RECORDS_MAX)
    make: Callable[[tallystick_nexmark.Topics], ts.Pipeline] = getattr(tallystick_nexmark, query)
    return make(topics)


def by_text(query: str) -> ts.Pipeline:
    """Return the pipeline of Flink's text, whose input has no end here."""
    text = script(query, "localhost:9092", "", "results")
    return program(text.replace("'latest-offset'", "'unbounded'"), query)


def seconds(pipeline: ts.Pipeline, records: dict[str, list[list[dict[str, bytes]]]]) -> float:
    """Return the CPU time of all epochs, the first left out: it loads what is loaded once."""
    driver = Driver(pipeline)
    took = 0.0
    for number, epoch in enumerate(zip(*records.values(), strict=True)):
        for kind, rows in zip(records, epoch, strict=True):
            driver.feed(kind, rows)
        began = time.process_time()
        driver.epoch()
        took += time.process_time() - began if number else 0.0
        driver.advance_clock("15 seconds")
    return took


def main() -> None:
    """Print a line for each query."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--queries", default=",".join(QUERIES))
    parser.add_argument("--events", type=int, default=400_000)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    for query in arguments.queries.split(","):
        kinds = (AUCTIONS, PERSONS) if query == "q8" else (BIDS,)
        records = {
            kind: [
                [
                    {"value": text.encode()}
                    for text in json_of(events(kind, at, at + EPOCH_EVENTS, SEED)).to_pylist()
                ]
                for at in range(0, arguments.events, EPOCH_EVENTS)
            ]
            for kind in kinds
        }
        rounds = [
            [seconds(make(query), records) for make in (by_hand, by_text)]
            for _ in range(arguments.rounds + 1)
        ]
        hand, text = map(min, zip(*rounds[1:], strict=True))  # the first one loads and compiles
        print(f"{query:4} by hand {hand:6.2f} s, as SQL {text:6.2f} s: {hand / text:.2f}")


if __name__ == "__main__":
    main()
