"""The pipeline under attack, in a process of its own: `python -m tallystick_tools.demo.job …`.

Flights are enriched, then each gets its number among the flights to the same destination: a count
in keyed state, in as many tasks as an option says. `--stateless` leaves the count out.

Prints one line of JSON per fact of the epoch protocol, so that the parent can aim its kills; with
`--die-at` the process kills itself at the given fact.
"""

import argparse
import json
import os
import signal
import sys

import pyarrow as pa
import pyarrow.compute as pc

import tallystick as ts
from tallystick.epoch import protocol
from tallystick_tools.demo.flights import STEP, TOPIC_IN, TOPIC_OUT

NAME = "flights-demo"
SCHEMA = "id bigint, carrier string, origin string, dest string, dep_delay double"
ENRICHED = (
    "id bigint, carrier string, dest string, route string, late boolean, delay_class string, "
    "dep_delay double"
)
COUNTED = ENRICHED + ", nth bigint"
FACTS = {
    "prepared": protocol.EpochRan,
    "completed": protocol.ManifestWritten,
    "committed": protocol.TransactionCommitted,
}
"""Crash point -> the fact after which it lies."""


def enrich(flights: pa.RecordBatch) -> pa.RecordBatch:
    """Drop cancelled flights; add the delay class and the route of the others."""
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
            "dest": flew["dest"],
            "route": pc.binary_join_element_wise(flew["origin"], flew["dest"], "-"),
            "late": pc.greater_equal(delay, 15.0),
            "delay_class": delay_class,
            "dep_delay": delay,
        }
    )


def pipeline(bootstrap_servers: str, epoch_records: int, parallelism: int | None) -> ts.Pipeline:
    """Return the pipeline that enriches flights, and counts them by destination.

    Args:
        bootstrap_servers: of the broker.
        epoch_records: the number of flights in an epoch.
        parallelism: the number of tasks that count by destination; None: no count.
    """
    source = ts.KafkaSource(
        bootstrap_servers,
        topics=[TOPIC_IN],
        value=ts.Json(SCHEMA),
        starting_offsets="earliest",
        max_offsets_per_trigger=epoch_records,
    )
    sink = ts.KafkaSink(
        bootstrap_servers,
        topic=TOPIC_OUT,
        key="carrier" if parallelism is None else "dest",
        value=ts.Json(),
        transaction_timeout_ms=130_000,
    )
    enriched = ts.Pipeline(NAME).read(source).map_batches(enrich, schema=ENRICHED)
    if parallelism is None:
        return enriched.write(sink)
    kept = [column.split()[0] for column in ENRICHED.split(", ")]
    counting = ts.aggregate({"nth": ts.count()}, each="record", keep=kept)
    counted = enriched.key_by("dest").process(
        counting, output=COUNTED, parallelism=parallelism, uid=STEP
    )
    return counted.write(sink)


class Reporter:
    """A listener that reports each fact to the parent, and dies at the fact `die_at`.

    Only facts from `EpochRan` on are counted: the seed of a lineage is written and committed too.
    """

    def __init__(self, die_at: str | None, die_epoch: int) -> None:
        self._fatal = FACTS[die_at] if die_at else None
        self._countdown = die_epoch
        self._has_run = False

    def __call__(self, event: protocol.Event) -> None:
        """Report an event of the driver, and die at the chosen one."""
        match event:
            case protocol.EpochWanted() | protocol.EpochPlanned(None):
                return  # asked for many times a second while there is nothing to read
            case protocol.EpochPlanned():
                self._has_run = False
            case protocol.EpochRan():
                self._has_run = True
        sys.stdout.write(json.dumps({"event": type(event).__name__}) + "\n")
        sys.stdout.flush()
        if self._fatal is not None and isinstance(event, self._fatal) and self._has_run:
            self._countdown -= 1
            if self._countdown == 0:
                os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Run the pipeline until something kills it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bootstrap-servers", required=True)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--epoch-records", type=int, required=True)
    parser.add_argument("--parallelism", type=int, default=1)
    parser.add_argument("--stateless", action="store_true")
    parser.add_argument("--ui-port", type=int)
    parser.add_argument("--die-at", choices=sorted(FACTS))
    parser.add_argument("--die-epoch", type=int, default=1)
    arguments = parser.parse_args()
    flights_pipeline = pipeline(
        arguments.bootstrap_servers,
        arguments.epoch_records,
        None if arguments.stateless else arguments.parallelism,
    )
    query = flights_pipeline.start(
        checkpoint=arguments.checkpoint,
        listener=Reporter(arguments.die_at, arguments.die_epoch),
        ui_port=arguments.ui_port,
    )
    query.awaitTermination()


if __name__ == "__main__":
    main()
