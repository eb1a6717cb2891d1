"""One run of one system: start it, watch its output grow, verify, and book what it cost."""

import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from .dataset import Verdict
from .judges import Judges
from .processes import Session, cpu_s, machine_cpu_s
from .systems import Job, System
from .timeline import Figures, Sample, figures, first_output_s
from .topics import Topics
from .workspace import Workspace

SAMPLE_EVERY_S = 0.1
MEMORY_EVERY_S = 1.0
"""Reading the memory of a large JVM takes the kernel milliseconds."""
QUIET_AFTER_END_S = 1.5
"""How long the output of an ended job must stand still, all of it committed."""
QUIET_WHILE_RUNNING_S = 5.0
"""The same for a job that never ends by itself; longer than any of its commit intervals."""
GRACE_S = 20.0
LOG_SHOWN_CHARS = 4000
FIRST_MARK = re.compile(r"^FIRST (\d+)$", re.MULTILINE)
"""Each job prints it, with the time in ms, when its work begins."""


class RunError(Exception):
    """A job failed or did not end; the message holds the end of its log."""


@dataclass(frozen=True, slots=True)
class Broker:
    """The broker under test.

    Args:
        bootstrap: `host:port`.
        pids: its processes, whose CPU is booked apart.
    """

    bootstrap: str
    pids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Input:
    """A topic, and the records that it was loaded with."""

    topic: str
    records: int


@dataclass(frozen=True, slots=True)
class Result:
    """What one run of one system gave.

    Args:
        system: that ran.
        input: what it was given.
        done_records: how much of it the output covers: less only where the run was cut off.
        figures: of what it did.
        peak_memory_mib: of all its processes together.
        verdict: on its output.
    """

    system: System
    input: Input
    done_records: int
    figures: Figures
    peak_memory_mib: float
    verdict: Verdict

    @property
    def complete(self) -> bool:
        """Whether the run came to its end."""
        return self.done_records == self.input.records


class Bench:
    """Runs systems, one after the other, on one broker.

    Args:
        workspace: where the jobs were built, and may write.
        broker: holds the inputs; outputs are made and removed there.
        topics: of that broker.
        judges: of the outputs.
        epoch_records_max: see `Job`.
        timeout_s: a run that takes longer has failed.
        cut_off_s: a slow system's run is ended after that time.
    """

    def __init__(
        self,
        workspace: Workspace,
        broker: Broker,
        topics: Topics,
        judges: Judges,
        *,
        epoch_records_max: int,
        timeout_s: float,
        cut_off_s: float,
    ) -> None:
        self._workspace = workspace
        self._broker = broker
        self._topics = topics
        self._judges = judges
        self._epoch_records_max = epoch_records_max
        self._timeout_s = timeout_s
        self._cut_off_s = cut_off_s

    def run(self, system: System, records: Input, name: str) -> Result:
        """Run `system` once, from an empty output topic to its verified end.

        Raises:
            RunError: the job failed, or did not end in time.
            DatasetError: the verifier failed.
        """
        directory = self._workspace.directory / "runs" / name
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        job = Job(
            name=name,
            bootstrap=self._broker.bootstrap,
            input_topic=records.topic,
            output_topic=name,
            directory=directory,
            epoch_records_max=self._epoch_records_max,
        )
        self._topics.create(job.output_topic)
        try:
            return self._run(system, records, job)
        finally:
            self._topics.delete(job.output_topic)
            self._topics.delete_below(f"{name}-")

    def _run(self, system: System, records: Input, job: Job) -> Result:
        log = job.directory / "log"
        command = system.command(self._workspace, job)
        started_s = time.time()
        with started(command, job.directory, log) as process:
            watch = _Watch(self._broker, Session(process.pid), self._topics, job.output_topic)
            try:
                ended = self._watch_to_end(system, records, process, watch, started_s)
            except RunError as error:
                raise RunError(f"{job.name}: {error}\n{tail(log)}") from None
        if watch.committed() == 0:
            raise RunError(f"{job.name}: no output\n{tail(log)}")
        judged = self._judges.judge(system, job.input_topic, job.output_topic, cut_off=not ended)
        samples = watch.samples
        done_records = records.records
        if judged.done is not None:
            samples = _in_input_records(samples, judged.done)
            done_records = samples[-1].committed
        return Result(
            system=system,
            input=records,
            done_records=done_records,
            figures=figures(
                samples,
                started_s=started_s,
                first_s=_first_s(log) if system.says_first else first_output_s(samples),
                records=done_records,
            ),
            peak_memory_mib=watch.peak_memory_mib,
            verdict=judged.verdict,
        )

    def _watch_to_end(
        self,
        system: System,
        records: Input,
        process: subprocess.Popen[bytes],
        watch: "_Watch",
        started_s: float,
    ) -> bool:
        """Sample until the output is complete: all committed, and still for long enough.

        False: it was not, and the system's time is over.
        """
        rows_min = self._judges.rows_min(system, records.records)
        while True:
            watch.sample()
            code = process.poll()
            if code not in (None, 0):
                raise RunError(f"the job ended with code {code}")
            quiet_s = QUIET_WHILE_RUNNING_S if code is None else QUIET_AFTER_END_S
            # A run that ends with too little output is the verifier's to judge.
            may_be_done = code == 0 or (not system.ends and watch.committed() >= rows_min)
            if may_be_done and watch.still_s() >= quiet_s:
                return True
            passed_s = time.time() - started_s
            if system.slow and passed_s > self._cut_off_s:
                return False
            if passed_s > self._timeout_s:
                raise RunError(f"not done after {self._timeout_s:.0f} s")
            time.sleep(SAMPLE_EVERY_S)


class _Watch:
    """Takes the samples of one run."""

    def __init__(self, broker: Broker, session: Session, topics: Topics, topic: str) -> None:
        self._broker = broker
        self._session = session
        self._topics = topics
        self._topic = topic
        self._memory_due_s = 0.0
        self.samples: list[Sample] = []
        self.peak_memory_mib = 0.0

    def sample(self) -> None:
        """Take one sample of everything, and now and then of the memory."""
        ends = self._topics.ends(self._topic)
        now_s = time.time()
        self.samples.append(
            Sample(
                at_s=now_s,
                written=ends.written,
                committed=ends.committed,
                committed_each=ends.committed_each,
                job_cpu_s=self._session.cpu_s(),
                broker_cpu_s=sum(map(cpu_s, self._broker.pids)),
                harness_cpu_s=time.process_time(),
                machine_cpu_s=machine_cpu_s(),
            )
        )
        if now_s >= self._memory_due_s:
            self.peak_memory_mib = max(self.peak_memory_mib, self._session.pss_mib())
            self._memory_due_s = now_s + MEMORY_EVERY_S

    def committed(self) -> int:
        """The committed end as last seen."""
        return self.samples[-1].committed

    def still_s(self) -> float:
        """For how long everything written has been committed and nothing came; 0: not so."""
        last = self.samples[-1]
        if last.written != last.committed:
            return 0.0
        since_s = last.at_s
        for sample in reversed(self.samples):
            if (sample.written, sample.committed) != (last.written, last.committed):
                break
            since_s = sample.at_s
        return last.at_s - since_s


@contextmanager
def started(
    command: Sequence[str], directory: Path, log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a session of its own; on leaving, nothing of that session is left."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        Session(process.pid).end(GRACE_S)
        process.wait()


def _in_input_records(
    samples: Sequence[Sample], done: Callable[[Sequence[int]], int]
) -> list[Sample]:
    """The same samples, with the committed end in input records after it."""
    known: dict[tuple[int, ...], int] = {}
    for sample in samples:
        if sample.committed_each not in known:
            known[sample.committed_each] = done(sample.committed_each)
    return [replace(sample, committed=known[sample.committed_each]) for sample in samples]


def _first_s(log: Path) -> float:
    """When the job's work began, by its own mark."""
    marks = [int(mark) for mark in FIRST_MARK.findall(log.read_text(errors="replace"))]
    if not marks:
        raise RunError(f"the job printed no FIRST mark:\n{tail(log)}")
    return min(marks) / 1000


def tail(log: Path) -> str:
    """The end of a job's log."""
    return log.read_text(errors="replace")[-LOG_SHOWN_CHARS:]
