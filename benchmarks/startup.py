"""How long a start takes: from the start of the process to the first committed record.

    .venv/bin/python benchmarks/startup.py [--jobs stateless,count] [--spark nothing] [--rounds 2]
        [--cold]

With `--cold`, each finds an empty cache: no kernel is compiled, and there is no archive of the
JVM's classes. The process that compiles kernels beside it is waited for, and counted.

Each start is a process of its own, on the same broker, which holds 40,000 records; epochs are of
10,000. Printed is a timeline, step by step, with the CPU seconds of all processes of the start: on
a busy machine they say more than the time does.
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

BEGAN_S = float(os.environ.get("TALLYSTICK_BENCH_BEGAN_S", time.time()))
HERE = Path(__file__).resolve().parent
RECORD_COUNT = 40_000
EPOCH_RECORDS = 10_000
FIRST_COMMIT_MAX_S = 180.0
COMPILER = "tallystick.host.kernel_cache"
POLL_S = 0.05
EVENTS = (
    *("ProducerFenced", "CommittedRead", "EpochPlanned", "EpochRan", "ManifestWritten"),
    *("TransactionCommitted", "OutputConfirmed"),
)
"""Of the epoch protocol; only the first of each is of the start."""


class Timeline:
    """What has happened, in seconds from the start of the process."""

    def __init__(self) -> None:
        self.marks: dict[str, float] = {}
        self.committed = threading.Event()
        self._records_ran = False

    def mark(self, what: str) -> None:
        """It happens now; the first time counts."""
        self.marks.setdefault(what, round(time.time() - BEGAN_S, 3))

    def hear(self, event: Any) -> None:
        """Take an event of the protocol."""
        name = type(event).__name__
        if name in EVENTS:
            self.mark(name)
        self._records_ran |= name == "EpochRan"
        if name == "TransactionCommitted" and self._records_ran:
            self.mark("first record is committed")
            self.committed.set()


def start(arguments: argparse.Namespace) -> None:
    """Start one job, and print its timeline; the process that is measured."""
    timeline = Timeline()
    timeline.mark("python runs")
    import tallystick as ts

    watch_spark(timeline)
    spark: Any = None
    if arguments.spark == "session":
        config = {"spark.ui.enabled": "false", "spark.sql.shuffle.partitions": "2"}
        spark = ts.spark_session("startup", master="local[2]", config=config)
        timeline.mark("session is up")
        spark.sparkContext.setLogLevel("ERROR")
    if arguments.job == "count":
        import tallystick_count

        arguments.starting_offsets = "earliest"
        pipeline = tallystick_count.pipeline(arguments)
    else:
        import tallystick_stateless

        topics = (arguments.bootstrap, arguments.input, arguments.output)
        pipeline = tallystick_stateless.pipeline(*topics, arguments.epoch_records)
    timeline.mark("pipeline is made")
    query = pipeline.start(
        spark,
        checkpoint=arguments.checkpoint,
        listener=timeline.hear,
        execution=arguments.execution,
    )
    timeline.mark("start() returned")
    while not timeline.committed.wait(0.05):
        assert query.isActive, query.exception()
    print("TIMELINE", json.dumps(timeline.marks), flush=True)
    time.sleep(FIRST_COMMIT_MAX_S)  # until it is ended: what has been used must stay visible


def watch_spark(timeline: Timeline) -> None:
    """Mark when Spark's context is asked for, and when it is there."""
    from pyspark import SparkContext

    begin, launch = SparkContext.__init__, SparkContext._do_init

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        timeline.mark("JVM is launched")
        begin(self, *args, **kwargs)
        timeline.mark("context is up")

    def do_init(self: Any, *args: Any, **kwargs: Any) -> Any:
        timeline.mark("JVM is up")
        return launch(self, *args, **kwargs)

    SparkContext.__init__ = init  # type: ignore[method-assign]
    SparkContext._do_init = do_init  # type: ignore[method-assign]


def cpu_by_process(session: int) -> dict[str, float]:
    """CPU seconds of the living processes of a session, by what they are."""
    from harness.processes import parse_stat

    cpu_s: dict[str, float] = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            stat = parse_stat(Path("/proc", entry, "stat").read_text())
            command = Path("/proc", entry, "cmdline").read_text()
        except OSError:
            continue
        if stat.session == session:
            is_worker = "pyspark.daemon" in command or "early_daemon" in command
            name = "JVM" if "java" in command.split("\0")[0] else "workers" * is_worker or "driver"
            cpu_s[name] = round(cpu_s.get(name, 0) + stat.cpu_s, 2)
    return cpu_s


class Compiler:
    """The process that compiles kernels into a cache, which outlives who started it."""

    def __init__(self, cache: Path) -> None:
        self._setting = f"TALLYSTICK_CACHE={cache}".encode()
        self.pid: int | None = None

    def watch(self) -> None:
        """Look for it until it is there; it runs for many seconds."""
        while self.pid is None:
            time.sleep(POLL_S)
            for entry in filter(str.isdigit, os.listdir("/proc")):
                with contextlib.suppress(OSError):
                    command = Path("/proc", entry, "cmdline").read_text()
                    ours = COMPILER in command.split("\0")
                    if ours and self._setting in Path("/proc", entry, "environ").read_bytes():
                        self.pid = int(entry)

    def wait(self) -> float:
        """Wait for its end; its CPU seconds."""
        from harness.processes import parse_stat

        used_s = 0.0
        with contextlib.suppress(OSError):  # it is gone
            while not (stat := parse_stat(Path(f"/proc/{self.pid}/stat").read_text())).ended:
                used_s = stat.cpu_s
                time.sleep(POLL_S)
        return used_s


def measure(arguments: argparse.Namespace, job: str, place: Path, names: tuple[str, str]) -> None:
    """Start the job in a process of its own, and print what it took."""
    from harness import results
    from harness.processes import Session, machine_cpu_s
    from harness.processes import cpu_s as cpu_s_of

    bootstrap, output = names
    command = [sys.executable, __file__, "--start", "--job", job, "--spark", arguments.spark]
    command += ["--execution", arguments.execution, "--bootstrap", bootstrap, "--output", output]
    command += ["--checkpoint", str(place / output)]
    machine_s = machine_cpu_s()
    environment = {
        **os.environ,
        "TALLYSTICK_BENCH_BEGAN_S": repr(time.time()),
        # Tasks find the jobs' functions there.
        "PYTHONPATH": os.pathsep.join((str(HERE), os.environ.get("PYTHONPATH", ""))),
        "TALLYSTICK_STATE_DIR": str(place / f"{output}-local"),
    }
    compiler = Compiler(place / f"{output}-cache")
    if arguments.cold:
        environment.pop("NUMBA_CACHE_DIR", None)
        environment["TALLYSTICK_CACHE"] = str(place / f"{output}-cache")
        threading.Thread(target=compiler.watch, daemon=True).start()
    with (place / f"{output}.log").open("w") as log:
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
    session = Session(process.pid)
    assert process.stdout is not None
    timeline = next((line for line in process.stdout if line.startswith("TIMELINE ")), None)
    cpu_s, by_process = session.cpu_s(), cpu_by_process(process.pid)
    if compiler.pid is not None:
        by_process["compiler"] = round(cpu_s_of(compiler.pid), 2)
        cpu_s += by_process["compiler"]
    others_s = machine_cpu_s() - machine_s - cpu_s
    whole = {}
    if arguments.cold and timeline is not None:
        whole = {"compiler_cpu_s": compiler.wait()}
        whole["compiled_s"] = round(time.time() - float(environment["TALLYSTICK_BENCH_BEGAN_S"]), 2)
    session.end(0.0)
    process.wait()
    if timeline is None:
        raise SystemExit(f"{job} did not start: {(place / f'{output}.log').read_text()[-2000:]}")
    marks = json.loads(timeline.removeprefix("TIMELINE "))
    first_s = marks["first record is committed"]
    print(
        f"== {job}, {arguments.execution}, given {arguments.spark}, {'cold' * arguments.cold}: "
        f"first record after {first_s:.2f} s, {cpu_s:.1f} CPU s {by_process}; others took "
        f"{others_s:.1f} CPU s {whole}"
    )
    before = 0.0
    for what, at_s in sorted(marks.items(), key=lambda mark: mark[1]):
        print(f"   {at_s:6.2f}  +{at_s - before:5.2f}  {what}")
        before = at_s
    sys.stdout.flush()
    row = {
        "job": job,
        "given": arguments.spark,
        "execution": arguments.execution,
        "cold": arguments.cold,
        **whole,
        "by_process_cpu_s": by_process,
        "first_s": first_s,
        "cpu_s": round(cpu_s, 2),
        "other_cpu_s": round(others_s, 2),
        "timeline_s": marks,
    }
    results.append_row(arguments.results, "startup", row, config=results.environment(HERE))


def main() -> None:
    """Measure, or be what is measured."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--jobs", default="stateless,count")
    parser.add_argument("--spark", choices=("nothing", "session"), default="nothing")
    parser.add_argument("--execution", choices=("resident", "jobs"), default="resident")
    parser.add_argument("--cold", action="store_true", help="with an empty cache")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--results", type=Path, default=HERE / "results.jsonl")
    inner = parser.add_argument_group("of the process that is measured")
    inner.add_argument("--start", action="store_true")
    for name in ("--job", "--bootstrap", "--output", "--checkpoint"):
        inner.add_argument(name)
    arguments = parser.parse_args()
    arguments.input, arguments.mode = "events", "record"
    arguments.epoch_records = EPOCH_RECORDS
    if arguments.start:
        return start(arguments)

    from confluent_kafka import Producer
    from epoch_cost import _event
    from harness.broker import start_broker
    from harness.topics import Topics

    place = Path(tempfile.mkdtemp(prefix="tallystick-startup-"))
    try:
        with start_broker(place / "broker") as broker, Topics(broker.bootstrap) as topics:
            topics.create(arguments.input)
            producer = Producer({"bootstrap.servers": broker.bootstrap, "linger.ms": 20})
            for number in range(RECORD_COUNT):
                user, value = _event(number)
                producer.produce(arguments.input, value, user)
                producer.poll(0)
            producer.flush()
            for number in range(arguments.rounds):
                for job in arguments.jobs.split(","):
                    output = f"{job}-{number}"
                    topics.create(output)
                    measure(arguments, job, place, (broker.bootstrap, output))
    finally:
        shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    main()
