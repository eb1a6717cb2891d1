"""Our side of the benchmark: parse JSON, drop country "us", upper-case the session, write JSON.

Run by `run.py`; alone: `tallystick_stateless.py BOOTSTRAP INPUT OUTPUT --checkpoint DIR`, with
`--transactions task` for a transaction per task.
Prints `FIRST <ms>` when its first epoch is planned and `DONE <ms>` when all input is written.
"""

import argparse
import os
import time

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession

import tallystick as ts
from tallystick.epoch.protocol import EpochPlanned

EVENT = "user string, ts bigint, amount double, country string, session string"


def drop_and_shout(events: pa.RecordBatch) -> pa.RecordBatch:
    """The job itself, on a batch of events at once."""
    kept = events.filter(pc.not_equal(events["country"], "us"))
    return pa.record_batch(
        {
            "user": kept["user"],
            "session": pc.utf8_upper(kept["session"]),
            "amount": kept["amount"],
            "ts": kept["ts"],
        }
    )


TWO_CORES = {"PYSPARK_SUBMIT_ARGS": "--master local[2] pyspark-shell"}
"""The environment that has a pipeline, given no session, start a Spark of as many as the peers."""


def session() -> SparkSession:
    """A Spark of two cores and a heap of 3 GB: for what passes its rows through the JVM."""
    config = {
        "spark.driver.memory": "3g",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }
    return ts.spark_session("bench", master="local[2]", config=config)


def pipeline(
    bootstrap: str,
    input_topic: str,
    output_topic: str,
    epoch_records: int,
    transactions: str = "epoch",
) -> ts.Pipeline:
    """The job between its topics.

    It is named after its output, as each run has one of its own: what an earlier run committed
    under the same name must not be taken up again.
    """
    source = ts.KafkaSource(
        bootstrap,
        topics=[input_topic],
        value=ts.Json(EVENT),
        starting_offsets="earliest",
        max_offsets_per_trigger=epoch_records,
        options={"metadata.columns": "none"},  # the job looks at values only, as the peers' do
    )
    sink = ts.KafkaSink(
        bootstrap,
        topic=output_topic,
        key="user",
        value=ts.Json(),
        compression="none",
        transactions=transactions,
    )
    return ts.Pipeline(output_topic).read(source).map_batches(drop_and_shout).write(sink)


class SayFirst:
    """A listener that prints `FIRST <ms>` when the first epoch is planned: Spark is up."""

    def __init__(self) -> None:
        self._is_said = False

    def __call__(self, event: object) -> None:
        """Take an event of the protocol."""
        if isinstance(event, EpochPlanned) and not self._is_said:
            self._is_said = True
            print("FIRST", time.time_ns() // 1_000_000, flush=True)


def main() -> None:
    """Read all that the input topic holds now, and end."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("bootstrap")
    parser.add_argument("input")
    parser.add_argument("output")
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--epoch-records", type=int, default=1_000_000)
    parser.add_argument("--transactions", default="epoch")
    arguments = parser.parse_args()

    os.environ.update(TWO_CORES)
    job = pipeline(
        arguments.bootstrap,
        arguments.input,
        arguments.output,
        arguments.epoch_records,
        arguments.transactions,
    )
    query = job.start(
        checkpoint=arguments.checkpoint, trigger={"availableNow": True}, listener=SayFirst()
    )
    query.awaitTermination()
    print("DONE", time.time_ns() // 1_000_000, flush=True)
    for progress in query.recentProgress:
        size, took = progress["epochSize"], progress["durationMs"]
        print(progress["batchId"], progress["execution"], size, took, flush=True)


if __name__ == "__main__":
    main()
