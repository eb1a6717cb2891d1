"""Our side of the keyed benchmark: per user, count and sum of amounts; read JSON, write JSON.

Run by `run.py` and `latency.py`; alone: `tallystick_count.py BOOTSTRAP INPUT OUTPUT --checkpoint
DIR`. Prints `FIRST <ms>` when its first epoch is planned and, if it ends, `DONE <ms>`.
"""

import argparse
import os
import time
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import tallystick_stateless
from harness.count_check import MODES, RECORD

import tallystick as ts
from tallystick.checkpoint.local.store import ROOT_VARIABLE
from tallystick.state.functions.aggregates import count
from tallystick.state.functions.aggregates import sum as total
from tallystick.state.functions.ready_made import aggregate

EVENT = "user string, amount double, ts bigint"
TOTALS = "user string, ts bigint, count bigint, sum double"
AVAILABLE_NOW = "available-now"
CENTS_DIGITS = 2


def rounded(totals: pa.RecordBatch) -> pa.RecordBatch:
    """Sums in whole cents, as all peers write them."""
    return pa.record_batch(
        {
            "user": totals["user"],
            "count": totals["count"],
            "sum": pc.round(totals["sum"], CENTS_DIGITS),
            "ts": totals["ts"],
        }
    )


def pipeline(arguments: argparse.Namespace) -> ts.Pipeline:
    """The job between its topics, named after its output, as each run has one of its own."""
    source = ts.KafkaSource(
        arguments.bootstrap,
        topics=[arguments.input],
        value=ts.Json(EVENT),
        starting_offsets=arguments.starting_offsets,
        max_offsets_per_trigger=arguments.epoch_records,
    )
    sink = ts.KafkaSink(
        arguments.bootstrap,
        topic=arguments.output,
        key="user",
        value=ts.Json(),
        compression="none",
    )
    # What it calls a record and an epoch is what the benchmark does.
    totals = aggregate({"count": count(), "sum": total("amount")}, each=arguments.mode, keep=["ts"])
    return (
        ts.Pipeline(arguments.output)
        .read(source)
        .key_by("user")
        .process(totals, output=TOTALS)
        .map_batches(rounded)
        .write(sink)
    )


def trigger(text: str) -> Mapping[str, Any]:
    """The trigger: "1 second" and the like, or all that is there now."""
    return {"availableNow": True} if text == AVAILABLE_NOW else {"processingTime": text}


def main() -> None:
    """Read all that the input topic holds now, and end; with another trigger, go on for ever."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("bootstrap")
    parser.add_argument("input")
    parser.add_argument("output")
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--mode", choices=MODES, default=RECORD)
    parser.add_argument("--epoch-records", type=int, default=1_000_000)
    parser.add_argument("--trigger", default=AVAILABLE_NOW)
    parser.add_argument("--starting-offsets", default="earliest")
    arguments = parser.parse_args()

    # The workers' copies of the state, beside the checkpoint: a run leaves nothing elsewhere.
    os.environ.setdefault(ROOT_VARIABLE, f"{arguments.checkpoint}-local")
    os.environ.update(tallystick_stateless.TWO_CORES)
    job = pipeline(arguments)
    query = job.start(
        checkpoint=arguments.checkpoint,
        trigger=trigger(arguments.trigger),
        listener=tallystick_stateless.SayFirst(),
    )
    query.awaitTermination()
    print("DONE", time.time_ns() // 1_000_000, flush=True)
    for progress in query.recentProgress:
        size, took = progress["epochSize"], progress["durationMs"]
        print(progress["batchId"], progress["execution"], size, took, flush=True)


if __name__ == "__main__":
    main()
