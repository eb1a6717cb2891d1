"""A pipeline of a user's own program, to be ended by signals: `python -m tests.spark.drained_job`.

It prints the moments that a test waits for, and stays at a prepared epoch for a while.
"""

import json
import signal
import sys
import time
from threading import Thread
from typing import Any

import tallystick as ts
from tallystick.epoch import protocol

PREPARED_S = 1.5


def pass_on() -> Any:
    """Made here, so that workers need no tests."""
    return lambda rows: rows.select(["key", "value"])


def tell_when_signals_are_noted() -> None:
    """The first epoch waits for its tasks then."""
    while signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        time.sleep(0.01)
    print("starting", flush=True)


def main() -> None:
    spec = json.loads(sys.argv[1])
    options = dict(spec["kafka"])
    servers = options.pop("kafka.bootstrap.servers")
    source = ts.KafkaSource(
        servers,
        topics=[spec["topic_in"]],
        starting_offsets="earliest",
        max_offsets_per_trigger=20,
        options=options,
    )
    sink = ts.KafkaSink(servers, topic=spec["topic_out"], options=options)
    pipeline = ts.Pipeline(spec["name"]).read(source).map_batches(pass_on()).write(sink)

    def listen(event: protocol.Event) -> None:
        if isinstance(event, protocol.OutputCounted):
            print("prepared", flush=True)
            time.sleep(PREPARED_S)

    query = pipeline.start(checkpoint=spec["checkpoint"], listener=listen)
    Thread(target=tell_when_signals_are_noted, daemon=True).start()
    query.awaitTermination()


if __name__ == "__main__":
    main()
