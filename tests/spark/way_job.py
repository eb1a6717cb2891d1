"""A stateless pipeline in a process of its own, traced for one epoch; see `test_way_of_a_record`.

`python -m tests.spark.way_job SERVERS FOLDER CHECKPOINT`, with `traced/` on the path.
"""

import os
import sys
from pathlib import Path

from confluent_kafka import Producer

import tallystick as ts
from tests.spark.topics import read_committed
from tests.waiting import wait_for

WAIT_S = 240.0
"""A start of Spark in which each call is looked at, beside other tests."""


def main(servers: str, folder: Path, checkpoint: str) -> None:
    producer = Producer({"bootstrap.servers": servers})
    options = {"bootstrap.servers": servers}
    count = 0

    def pass_on(records: int) -> None:
        """Send records, and wait until the pipeline has committed them."""
        nonlocal count
        for number in range(records):
            producer.produce("way-in", f'{{"u": "u{number % 7}", "n": {number}}}')
        producer.flush()
        count += records
        wait_for(
            lambda: len(read_committed(options, "way-out")), count, "records", timeout_s=WAIT_S
        )

    query = (
        ts.Pipeline("way")
        .read(
            ts.KafkaSource(
                servers,
                topics=["way-in"],
                value=ts.Json("u string, n bigint"),
                starting_offsets="earliest",
            )
        )
        .write(ts.KafkaSink(servers, topic="way-out", value=ts.Json()))
        .start(checkpoint=checkpoint)
    )
    pass_on(100)
    (folder / "on").touch()
    wait_for(lambda: living(folder, "waiting"), [], "processes that are not traced yet")
    pass_on(100)
    (folder / "on").unlink()
    wait_for(lambda: living(folder, "tracing"), [], "processes whose calls are not written yet")
    query.stop()


def living(folder: Path, state: str) -> list[Path]:
    """Return the files of a state whose process lives, and is Python's: a fork may become a JVM."""
    return [path for path in folder.glob(f"*.{state}") if is_python(path.stem)]


def is_python(pid: str) -> bool:
    """Return whether a process runs, and has the executable of this one."""
    try:
        return os.readlink(f"/proc/{pid}/exe") == os.readlink("/proc/self/exe")
    except OSError:  # it has ended
        return False


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
