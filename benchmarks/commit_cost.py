"""What committing a task's transaction takes, by how many partitions it wrote to.

    .venv/bin/python benchmarks/commit_cost.py [--partitions 8,100,1000] [--epochs N]

One task writes a row to each partition, prepares, and the driver commits. Printed, in ms, medians:
begin, write and prepare, EndTxn, and until the coordinator has written all markers: from then on
readers see the rows, and the transactional id can be used again.
"""

import argparse
import statistics
import time
import uuid
from collections import defaultdict
from pathlib import Path

import pyarrow as pa
from confluent_kafka.admin import AdminClient, NewTopic
from harness import results
from harness.broker import start_broker

from tallystick.epoch.two_phase import Owner, Place, RunFacts
from tallystick.kafka.audit import transaction_state
from tallystick.kafka.client import Client
from tallystick.kafka.config import KafkaConfig
from tallystick.kafka.output import KafkaOutput
from tallystick.kafka.task_sink import KafkaTaskSink

HERE = Path(__file__).resolve().parent
STEPS = ("begin", "write, prepare", "EndTxn", "markers")
WARM_UP = 3


def main() -> None:
    """Measure on a broker of our own."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--partitions", default="8,100,1000")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--work", type=Path, default=HERE / "work")
    parser.add_argument("--results", type=Path, default=HERE / "results.jsonl")
    arguments = parser.parse_args()
    rows = []
    with start_broker(arguments.work.resolve() / "commit-cost" / "broker") as broker:
        for count in map(int, arguments.partitions.split(",")):
            times = measure(broker.bootstrap, count, arguments.epochs)
            rows.append([str(count), *(f"{statistics.median(times[step]):.1f}" for step in STEPS)])
    print(results.markdown(["partitions", *STEPS], rows))
    config = {"epochs": arguments.epochs, "ms": rows}
    results.append_row(arguments.results, "commit_cost", config, config=results.environment(HERE))


def measure(bootstrap: str, count: int, epochs: int) -> dict[str, list[float]]:
    """The times of each step, in ms."""
    topic, owner = f"out-{count}", Owner(f"commits-{count}", "kafka-1", "lineage")
    admin = AdminClient({"bootstrap.servers": bootstrap})  # its answers come while it lives
    admin.create_topics([NewTopic(topic, count, 1)])[topic].result(60)
    config = KafkaConfig.from_options({"bootstrap.servers": bootstrap})
    output = KafkaOutput(config, topic, topic, compression="none", transaction_timeout_ms=600_000)
    prefix = f"tallystick-{owner.pipeline}"
    sink, client = KafkaTaskSink(output, owner, RunFacts(), id_prefix=prefix), Client(config)
    values = pa.RecordBatch.from_pydict(
        {
            "value": pa.array([b"x" * 100] * count, pa.binary()),
            "partition": pa.array(range(count), pa.int32()),
        }
    )
    ms_by_step: dict[str, list[float]] = defaultdict(list)
    for epoch in range(WARM_UP + epochs):
        plan, times = sink.plan(), [time.perf_counter()]
        writer = plan.begin(Place(owner, epoch, 0, 0, uuid.uuid4().hex))
        times.append(time.perf_counter())
        writer.write(values)
        [prepared] = writer.prepare()
        times.append(time.perf_counter())
        sink.commit(prepared)
        times.append(time.perf_counter())
        name = prepared.name.rsplit(":", 2)[0]
        while transaction_state(client, name).transaction_state != "CompleteCommit":
            pass
        times.append(time.perf_counter())
        if epoch >= WARM_UP:
            for step, first, stop in zip(STEPS, times, times[1:], strict=False):
                ms_by_step[step].append((stop - first) * 1000)
    sink.close()
    client.close()
    return ms_by_step


if __name__ == "__main__":
    main()
