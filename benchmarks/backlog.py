"""A backlog, read by epochs that size themselves and by epochs of a fixed million.

`backlog.py [--records 5000000] [--value-bytes 100] [--only sized fixed] [--output DIR]`

Prints a line of JSON per run: when the first epoch was committed (from the start of the query, the
Spark session being there), records per second, the sizes of the epochs, and the anonymous memory of
the largest task process in each quarter of the run. The job is an aggregate per user and epoch.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import tallystick_stateless
from confluent_kafka import Producer
from harness.broker import start_broker
from harness.processes import PROC, Session
from harness.topics import Topics

import tallystick as ts
from tallystick.pipeline import loop as pipeline_loop
from tallystick.pipeline.sizing import EpochSizes, Reason, SizeBound

USERS = 100_000
SAMPLE_S = 0.2
QUARTERS = 4


class FixedSizes(EpochSizes):
    """Epochs of a size that nothing changes."""

    fixed = 1_000_000

    def bound(self) -> SizeBound:
        """The size."""
        return SizeBound(self.fixed, Reason.OPTION)


def load(bootstrap: str, topic: str, count: int, value_bytes: int) -> None:
    """Write the backlog: JSON, padded."""
    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "linger.ms": 50,
            "queue.buffering.max.messages": 1_000_000,
            "compression.type": "lz4",
        }
    )
    chance = Random(1)
    padding = "".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=2 * value_bytes))
    for number in range(count):
        at = chance.randrange(value_bytes)
        value = (
            f'{{"user":"u{chance.randrange(USERS)}","amount":{number % 1000},'
            f'"pad":"{padding[at : at + value_bytes]}"}}'
        )
        while True:
            try:
                producer.produce(topic, value)
                break
            except BufferError:
                producer.poll(0.1)
    producer.flush()


def pipeline(arguments: argparse.Namespace) -> ts.Pipeline:
    """Count, sum, and the newest padding of each user, so that wide rows travel."""
    columns = {
        "count": ts.count(),
        "sum": ts.sum("amount", "double"),
        "pad": ts.last_value("pad", "string"),
    }
    return (
        ts.Pipeline(arguments.output_topic)
        .read(
            ts.KafkaSource(
                arguments.bootstrap,
                topics=[arguments.input_topic],
                value=ts.Json("user string, amount double, pad string"),
                starting_offsets="earliest",
                max_bytes_per_task=arguments.task_bytes,
            )
        )
        .key_by("user")
        .process(ts.aggregate(columns))
        .write(
            ts.KafkaSink(
                arguments.bootstrap, topic=arguments.output_topic, key="user", value=ts.Json()
            )
        )
    )


def job(arguments: argparse.Namespace) -> None:
    """One run, in a process of its own."""
    if arguments.sizes == "fixed":
        pipeline_loop.EpochSizes = FixedSizes  # type: ignore[misc]
    spark = tallystick_stateless.session()
    spark.range(2).mapInArrow(lambda batches: batches, "id long").count()  # workers are there
    started_s = time.time()
    query = pipeline(arguments).start(
        spark, checkpoint=arguments.checkpoint, trigger={"availableNow": True}, execution="jobs"
    )
    by_number: dict[int, Any] = {}
    has_ended: bool | None = False
    while not has_ended:
        has_ended = query.awaitTermination(0.5)
        by_number |= {progress["batchId"]: progress for progress in query.recentProgress}
    ended_s, epochs = time.time(), [by_number[number] for number in sorted(by_number)]
    took = [epoch["durationMs"]["triggerExecution"] / 1000 for epoch in epochs]
    sizes = [epoch["epochSize"]["offsets"] for epoch in epochs]
    first_s = datetime.fromisoformat(epochs[0]["timestamp"]).timestamp() + took[0]
    print(
        json.dumps(
            {
                "sizes": arguments.sizes,
                "records": sum(sizes),
                "first_commit_s": round(first_s - started_s, 2),
                "all_s": round(ended_s - started_s, 2),
                "records_per_s": round(sum(sizes) / (ended_s - started_s)),
                "warm_records_per_s": round(sum(sizes[1:]) / (ended_s - first_s))
                if len(sizes) > 1
                else None,
                "epochs": len(sizes),
                "offsets": sizes[:12],
                "took_s": [round(seconds, 2) for seconds in took[:12]],
                "longest_s": round(max(took), 2),
                "because": sorted({epoch["epochSize"]["because"] for epoch in epochs}),
                "busiest_task_mib": round(
                    max(epoch["epochSize"]["bytesOfBusiestTask"] for epoch in epochs) / 2**20, 1
                ),
            }
        ),
        flush=True,
    )


def anonymous_mib(pid: int) -> float:
    """Memory of a task process that no file holds: local copies of state are files."""
    try:
        name = (PROC / str(pid) / "cmdline").read_bytes()
        if b"pyspark" not in name or b"daemon" not in name:
            return 0.0
        for line in (PROC / str(pid) / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss_Anon:"):
                return int(line.split()[1]) / 1024
    except (FileNotFoundError, ProcessLookupError):
        pass
    return 0.0


def measured(command: list[str]) -> dict[str, Any]:
    """Run the job, and watch its task processes."""
    with subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE) as process:
        session, samples = Session(process.pid), []
        try:
            while process.poll() is None:
                samples.append(max(map(anonymous_mib, session.members()), default=0.0))
                time.sleep(SAMPLE_S)
            cpu_s = session.cpu_s()
        finally:
            session.end(5)
        assert process.stdout is not None
        lines = process.stdout.read().decode().splitlines()
    if process.returncode:
        raise SystemExit(f"the job ended with {process.returncode}")
    result: dict[str, Any] = json.loads(next(line for line in lines if line.startswith("{")))
    work = samples[next((at for at, mib in enumerate(samples) if mib), 0) :]
    bounds = [len(work) * at // QUARTERS for at in range(QUARTERS + 1)]
    result["task_peak_mib"] = [
        round(max(work[low:high], default=0)) for low, high in pairwise(bounds)
    ]
    result["cpu_s"] = round(cpu_s, 1)
    return result


def main() -> None:
    """Load once, run each kind of sizes, print what was found."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--records", type=int, default=5_000_000)
    parser.add_argument("--value-bytes", type=int, default=100)
    parser.add_argument("--task-bytes", type=int, default=64 << 20)
    parser.add_argument("--only", nargs="*", default=["sized", "fixed"])
    parser.add_argument("--output", type=Path, default=None)
    parser.add_argument("--bootstrap", help=argparse.SUPPRESS)
    parser.add_argument("--input-topic", default="backlog", help=argparse.SUPPRESS)
    parser.add_argument("--output-topic", help=argparse.SUPPRESS)
    parser.add_argument("--checkpoint", help=argparse.SUPPRESS)
    parser.add_argument("--sizes", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.bootstrap:
        job(arguments)
        return
    folder = Path(tempfile.mkdtemp(prefix="backlog-", dir=arguments.output))
    with start_broker(folder / "broker") as broker, Topics(broker.bootstrap) as topics:
        topics.create("backlog")
        began_s = time.monotonic()
        load(broker.bootstrap, "backlog", arguments.records, arguments.value_bytes)
        print(f"loaded in {time.monotonic() - began_s:.0f} s", file=sys.stderr, flush=True)
        for number, sizes in enumerate(arguments.only):
            name = f"out-{number}-{sizes}"
            topics.create(name)
            command = [sys.executable, __file__, "--bootstrap", broker.bootstrap]
            command += ["--output-topic", name, "--checkpoint", str(folder / name)]
            command += ["--sizes", sizes, "--task-bytes", str(arguments.task_bytes)]
            print(json.dumps(measured(command)), flush=True)


if __name__ == "__main__":
    main()
