"""The pipeline under attack, in a process of its own: `python -m tallystick.demo.job …`.

Prints one line of JSON per fact of the epoch protocol, so that the parent can aim; with `--die-at`
it kills itself the moment a given fact is one.
"""

import argparse
import json
import os
import signal
import sys

import pyarrow as pa
import pyarrow.compute as pc

import tallystick as ts
from tallystick.checkpoint import coordinator as c
from tallystick.demo.flights import TOPIC_IN, TOPIC_OUT

NAME = "flights-demo"
SCHEMA = "id bigint, carrier string, origin string, dest string, dep_delay double"
FACTS = {
    "prepared": c.EpochRan,
    "completed": c.ManifestWritten,
    "committed": c.TransactionCommitted,
}
"""Crash point -> the fact behind which it lies."""


def enrich(flights: pa.RecordBatch) -> pa.RecordBatch:
    """Drop cancelled flights; say of the others how late they were, and where they went."""
    flew = flights.filter(pc.is_valid(flights["dep_delay"]))
    delay = flew["dep_delay"]
    delay_class = pc.case_when(
        pc.make_struct(pc.less(delay, 0.0), pc.less(delay, 15.0), pc.less(delay, 60.0)),
        "early",
        "on time",
        "late",
        "very late",
    )
    return pa.RecordBatch.from_pydict(
        {
            "id": flew["id"],
            "carrier": flew["carrier"],
            "route": pc.binary_join_element_wise(flew["origin"], flew["dest"], "-"),
            "late": pc.greater_equal(delay, 15.0),
            "delay_class": delay_class,
            "dep_delay": delay,
        }
    )


class Reporter:
    """Tells the parent each fact, and dies at the one it was told to."""

    def __init__(self, die_at: str | None, die_epoch: int) -> None:
        self._fatal = FACTS[die_at] if die_at else None
        self._countdown = die_epoch

    def __call__(self, event: c.Event) -> None:
        """Called by the driver with each event."""
        sys.stdout.write(json.dumps({"event": type(event).__name__}) + "\n")
        sys.stdout.flush()
        if self._fatal is not None and isinstance(event, self._fatal):
            self._countdown -= 1
            if self._countdown == 0:
                os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Run the pipeline until something kills it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bootstrap-servers", required=True)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--epoch-records", type=int, required=True)
    parser.add_argument("--die-at", choices=sorted(FACTS))
    parser.add_argument("--die-epoch", type=int, default=1)
    arguments = parser.parse_args()
    spark = ts.spark_session(NAME, master="local[2]", config={"spark.ui.enabled": "false"})
    spark.sparkContext.setLogLevel("ERROR")
    query = (
        ts.Pipeline(NAME)
        .read(
            ts.KafkaSource(
                arguments.bootstrap_servers,
                topics=[TOPIC_IN],
                value=ts.Json(SCHEMA),
                starting_offsets="earliest",
                max_offsets_per_trigger=arguments.epoch_records,
            )
        )
        .map_batches(enrich)
        .write(
            ts.KafkaSink(
                arguments.bootstrap_servers,
                topic=TOPIC_OUT,
                key="carrier",
                value=ts.Json(),
                transaction_timeout_ms=130_000,
            )
        )
        .start(
            spark,
            checkpoint=arguments.checkpoint,
            listener=Reporter(arguments.die_at, arguments.die_epoch),
        )
    )
    query.awaitTermination()


if __name__ == "__main__":
    main()
