"""End-to-end latency of the keyed job at a steady rate: ours beside Flink, on one broker.

    .venv/bin/python benchmarks/latency.py [--rate 20000] [--warm-up S] [--seconds S] [--only a,b]

A paced producer stamps each record with the time of its sending; the job counts per user and writes
an update for each record, with that stamp; a read_committed consumer takes the difference when the
update comes to it. Prints a line per system; appends each to `results.jsonl`.
"""

import argparse
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import results
from harness.broker import start_broker
from harness.count_check import RECORD
from harness.measure import Broker, RunError, started, tail
from harness.processes import Session, cpu_s, machine_cpu_s
from harness.systems import COUNT, OPEN_FLAGS, build_flink, java
from harness.topics import Topics
from harness.workspace import Workspace, build_tools

HERE = Path(__file__).resolve().parent
RATE = 20_000
WARM_UP_S = 20
MEASURED_S = 30
START_MAX_S = 120
SLACK_S = 15
"""So much longer than planned records flow, and the consumer may take for its last ones."""
POLL_S = 0.1
PERCENTILES = ("p50", "p90", "p99", "p99.9", "pmax")
HEADINGS = [
    *("system", "updates", "mean ms", "p50", "p90", "p99", "p99.9", "max"),
    *("job cores", "broker cores", "all cores"),
]


@dataclass(frozen=True, slots=True)
class Run:
    """One run: what is read, what is written, and where the job may leave files."""

    bootstrap: str
    input_topic: str
    output_topic: str
    directory: Path


@dataclass(frozen=True, slots=True)
class Candidate:
    """A system at one setting.

    Args:
        name: as in `--only` and in the results.
        command: its command line.
        build: gets ready what it needs.
    """

    name: str
    command: Callable[[Workspace, Run], Sequence[str]]
    build: Callable[[Workspace], None]


def ours(name: str, trigger: str) -> Candidate:
    """Our job with a trigger."""

    def command(workspace: Workspace, run: Run) -> Sequence[str]:
        script = workspace.benchmarks / "tallystick_count.py"
        return [
            *(sys.executable, str(script), run.bootstrap, run.input_topic, run.output_topic),
            *("--checkpoint", str(run.directory / "checkpoint"), "--mode", RECORD),
            *("--trigger", trigger, "--starting-offsets", "latest"),
        ]

    return Candidate(name, command, lambda _: None)


def flink(name: str, checkpoint_ms: int) -> Candidate:
    """Flink with its state on the heap: its output is visible at each checkpoint."""

    def command(workspace: Workspace, run: Run) -> Sequence[str]:
        return [
            *java(workspace, "flink", *OPEN_FLAGS),
            *("peers.FlinkJob", COUNT, run.bootstrap, run.input_topic, run.output_topic),
            *(str(checkpoint_ms), "hashmap", "false", run.output_topic),
        ]

    return Candidate(name, command, build_flink)


CANDIDATES = {
    candidate.name: candidate
    for candidate in (
        ours("ours, 1 second", "1 second"),
        ours("ours, 100 milliseconds", "100 milliseconds"),
        ours("ours, as fast as possible", "0 seconds"),
        flink("flink, 1 second", 1000),
        flink("flink, 100 milliseconds", 100),
    )
}


def main() -> int:
    """Run all, one after the other; exit code 1 when one failed."""
    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    workspace = Workspace(arguments.work.resolve(), arguments.peers.resolve(), HERE)
    chosen = [
        candidate
        for candidate in CANDIDATES.values()
        if any(candidate.name.startswith(prefix) for prefix in arguments.only)
    ]
    workspace.directory.mkdir(parents=True, exist_ok=True)
    build_tools(workspace)
    for candidate in chosen:
        candidate.build(workspace)
    rows_shown, failed = [], 0
    with (
        start_broker(workspace.directory / "broker") as broker,
        Topics(broker.bootstrap) as topics,
    ):
        for number, candidate in enumerate(chosen):
            print(f"{candidate.name} ...", flush=True)
            try:
                row = measure(workspace, broker, topics, candidate, f"latency-{number}", arguments)
            except RunError as error:
                print(f"  failed: {error}", file=sys.stderr, flush=True)
                failed += 1
                continue
            print(f"  {row}", flush=True)
            config = {**results.environment(HERE), "rate": arguments.rate}
            results.append_row(arguments.results, f"latency: {candidate.name}", row, config=config)
            rows_shown.append([candidate.name, *map(str, row.values())])
    print(f"\n{results.markdown(HEADINGS, rows_shown)}")
    return 1 if failed else 0


def parse_arguments() -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rate", type=int, default=RATE, help="records per second")
    parser.add_argument("--warm-up", type=int, default=WARM_UP_S, help="seconds after the first")
    parser.add_argument("--seconds", type=int, default=MEASURED_S, help="that count")
    parser.add_argument(
        "--start-max", type=int, default=START_MAX_S, help="seconds to the first update"
    )
    parser.add_argument(
        "--only", type=lambda text: text.split(";"), default=[""], help="beginnings of names, by ;"
    )
    parser.add_argument("--peers", type=Path, default=HERE.parent.parent / "shared" / "peers")
    parser.add_argument("--work", type=Path, default=HERE / "work")
    parser.add_argument("--results", type=Path, default=HERE / "results.jsonl")
    return parser.parse_args()


def measure(
    workspace: Workspace,
    broker: Broker,
    topics: Topics,
    candidate: Candidate,
    name: str,
    arguments: argparse.Namespace,
) -> dict[str, float]:
    """One candidate's latencies and cores.

    Raises:
        RunError: the job ended, or nothing of it came.
    """
    directory = workspace.directory / "runs" / name
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    run = Run(broker.bootstrap, f"{name}-in", f"{name}-out", directory)
    for topic in (run.input_topic, run.output_topic):
        topics.create(topic)
    log = directory / "log"
    try:
        with started(candidate.command(workspace, run), directory, log) as job:
            try:
                return _measure(workspace, broker, topics, run, job, arguments)
            except RunError as error:
                raise RunError(f"{candidate.name}: {error}\n{tail(log)}") from None
    finally:
        topics.delete_below(f"{name}-")


def _measure(
    workspace: Workspace,
    broker: Broker,
    topics: Topics,
    run: Run,
    job: "subprocess.Popen[bytes]",
    arguments: argparse.Namespace,
) -> dict[str, float]:
    """Feed the job, and time what comes out of it.

    The records flow while the job starts: the time to warm up begins with the first update.
    """
    warm_up_s, seconds = arguments.warm_up, arguments.seconds
    flow_s = arguments.start_max + warm_up_s + seconds + SLACK_S
    producer = _tool(workspace, "pace", run.bootstrap, run.input_topic, arguments.rate, flow_s)
    consumer = None
    try:
        deadline_s = time.monotonic() + arguments.start_max
        while topics.ends(run.output_topic).committed == 0:
            _check(job)
            if time.monotonic() > deadline_s:
                raise RunError(f"no update was committed within {arguments.start_max} s")
            time.sleep(POLL_S)
        consumer = _tool(workspace, "lat", run.bootstrap, run.output_topic, warm_up_s, seconds)
        assert consumer.stdout is not None
        if consumer.stdout.readline().strip() != "ready":
            raise RunError("the consumer did not start")
        _sleep(warm_up_s, job)
        before = _cpu(broker, job)
        _sleep(seconds, job)
        after = _cpu(broker, job)
        output, _ = consumer.communicate(timeout=SLACK_S)
    except subprocess.TimeoutExpired:
        raise RunError("the consumer got no more updates") from None
    finally:
        for process in (producer, consumer):
            if process is not None:
                process.kill()
                process.wait()
    figures = json.loads(output.strip().splitlines()[-1])
    if figures["n"] == 0:
        raise RunError("no update came while it counted")
    cores = [round((end - start) / seconds, 2) for start, end in zip(before, after, strict=True)]
    return {
        "updates": figures["n"],
        "mean_ms": figures["mean_ms"],
        **{f"{percentile}_ms": figures[percentile] for percentile in PERCENTILES},
        "job_cores": cores[0],
        "broker_cores": cores[1],
        "all_cores": cores[2],
    }


def _tool(workspace: Workspace, command: str, *arguments: object) -> "subprocess.Popen[str]":
    """The peers' paced producer, or their consumer."""
    flags = ["-Xmx512m", "-XX:+UseSerialGC", "-cp", workspace.tools_classpath()]
    return subprocess.Popen(
        ["java", *flags, "peers.Tools", command, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def _cpu(broker: Broker, job: "subprocess.Popen[bytes]") -> tuple[float, float, float]:
    """CPU seconds of the job, of the broker, and of the whole machine."""
    return Session(job.pid).cpu_s(), sum(map(cpu_s, broker.pids)), machine_cpu_s()


def _sleep(seconds: float, job: "subprocess.Popen[bytes]") -> None:
    deadline_s = time.monotonic() + seconds
    while (left_s := deadline_s - time.monotonic()) > 0:
        _check(job)
        time.sleep(min(left_s, POLL_S))


def _check(job: "subprocess.Popen[bytes]") -> None:
    if job.poll() is not None:
        raise RunError(f"the job ended with code {job.returncode}")


if __name__ == "__main__":
    sys.exit(main())
