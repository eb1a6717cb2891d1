"""A process that waits for runs without Spark and Kafka: `python -m tests.run.waiting_job JSON`.

It prints what the runs do, so that a test can send it signals at chosen moments.
"""

import json
import logging
import os
import signal
import sys
import time
from threading import Event, Thread
from typing import Any

from tallystick.run import query as query_module
from tallystick.run.epoch_loop import EpochLoop, Trigger
from tallystick.run.query import Query


def tell(text: str) -> None:
    """Print a line by one write: runs print side by side."""
    os.write(1, f"{text}\n".encode())


class Driver:
    """Runs epochs of a given duration, which a cancelled run leaves; the second may fail."""

    def __init__(self, name: str, spec: dict[str, Any]) -> None:
        self._name, self._spec = name, spec
        self.cancelled = Event()
        self.runs_epoch = False
        self._epochs = 0

    def run_next(self, _: object) -> bool:
        if self._epochs == self._spec.get("last_epoch"):
            tell("between epochs")
            return False
        self._epochs += 1
        tell(f"{self._name} epoch {self._epochs} begins")
        if self.cancelled.wait(self._spec["epoch_s"]):
            raise RuntimeError("cancelled")
        if self._spec.get("fails"):
            raise ValueError("of the user's function")
        tell(f"{self._name} epoch {self._epochs} ends")
        return True

    def end(self) -> None: ...

    def abort_strays(self) -> None: ...


class Source:
    is_behind = True

    def stop_at_what_is_there(self) -> None: ...


def run(name: str, spec: dict[str, Any]) -> Query:
    driver: Any = Driver(name, spec)
    source: Any = Source()
    trigger = Trigger(is_available_now=spec.get("available_now", False))
    query = Query(
        *(name, "query", "run"),
        loop=lambda note: EpochLoop(driver, source, trigger, lambda ended: note(ended) and None),
        prepare=lambda: None,
        cancel=driver.cancelled.set,
        close=lambda: tell(f"{name} closed"),
        describe=lambda _: {"batchId": driver._epochs},
        rescale=lambda _: None,
        key=name,
    )
    query.begin()
    return query


def tell_when_signals_are_noted() -> None:
    while signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        time.sleep(0.01)
    tell("waiting")


def main() -> None:
    spec = json.loads(sys.argv[1])
    query_module.DRAIN_S = spec.get("drain_s", query_module.DRAIN_S)
    if spec.get("logs"):
        logging.basicConfig(level=logging.INFO)
    if spec.get("own_handler"):
        signal.signal(signal.SIGTERM, lambda *_: tell("own handler"))
    Thread(target=tell_when_signals_are_noted, daemon=True).start()
    queries = [run(name, spec) for name in spec.get("names", ["late"])]
    try:
        queries[0].awaitTermination(spec.get("timeout"))
    finally:
        is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        tell(f"SIGINT is Python's again: {is_default}")
    time.sleep(spec.get("then_s", 0))


if __name__ == "__main__":
    main()
