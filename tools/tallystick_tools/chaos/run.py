"""One run of the user's program: the input, the faults of a schedule, and the output."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from tallystick.codec.rows import partition_of
from tallystick.errors import OptionError
from tallystick_tools.chaos.clock import clock_of
from tallystick_tools.chaos.cluster import (
    Cluster,
    Feed,
    InputRecord,
    OutputRecord,
    Witness,
    read_all,
    running,
)
from tallystick_tools.chaos.existing_cluster import existing
from tallystick_tools.chaos.faults import Injector
from tallystick_tools.chaos.object_store import ObjectStore
from tallystick_tools.chaos.program import ProgramSettings, Supervisor
from tallystick_tools.chaos.schedule import NEEDS_CLOCK, Fault
from tallystick_tools.chaos.state import state_of

PART_S = 1.5
"""The time over which the input of one fault is written."""
QUIET_S = 3.0
"""The time without new output, after all input is read, that ends a run."""
LINGER_S = 30.0
"""The longest time that rows may wait for a commit, after all input is read, before the program is
started again: a pipeline removes by itself what a zombie began late, a query of Structured
Streaming in its first epoch after that."""
POLL_S = 0.2
OWN_ENDS_MAX = 5
"""The most ends of the program's own, without progress, before a run is given up."""


class Store(Protocol):
    """A place of a program's output other than a topic, for one run."""

    def look(self) -> object:
        """Return a value that changes with the visible rows; None: rows wait for a commit."""

    def rows(self) -> list[OutputRecord]:
        """Return the visible rows.

        Raises:
            TimeoutError: Rows still wait for a commit.
        """

    def close(self) -> None:
        """Close what is open."""


@dataclass(frozen=True, slots=True)
class Job:
    """The user's program with its input, output and cluster.

    Args:
        command: The program and its arguments.
        inputs: The records of each input topic.
        outputs: The output topics.
        partitions: Of each topic.
        brokers: One or three; 0: a given cluster's.
        transaction_version: The cluster's feature; None: its newest.
        timeout_s: How long a run may go without progress.
    """

    command: tuple[str, ...]
    inputs: Mapping[str, Sequence[InputRecord]]
    outputs: tuple[str, ...]
    partitions: int = 4
    brokers: int = 1
    transaction_version: int | None = None
    timeout_s: float = 180.0
    servers: str = ""
    """The given cluster's `host:port,…`."""
    checkpoint: str = ""
    """The folder in an object store for its checkpoints; "": they are on the local disk."""
    stores: tuple[Callable[[Path], Store], ...] = ()
    """Places of its output beside topics: each is opened for a run, given the run's folder."""

    def cluster(self) -> AbstractContextManager[Cluster]:
        """Return a cluster for one run, with empty topics."""
        topics = tuple(self.inputs), self.outputs, self.partitions
        if self.servers:
            return existing(self.servers, *topics)
        return running(self.brokers, *topics, self.transaction_version)


@dataclass(frozen=True, slots=True)
class InjectedFault:
    """A fault that was carried out.

    Args:
        fault: The planned fault.
        began_s: The start, in seconds after the start of the run.
        ended_s: The end, in the same measure.
        hit: The target, as text; "": nothing was hit.
    """

    fault: Fault
    began_s: float
    ended_s: float
    hit: str


@dataclass
class Run:
    """The record of a run.

    Args:
        records: The output, by partition in the order of the log.
        state: Of each step, a text for each key; None: the state is not compared.
        injected: The faults.
        progress: Seconds after the beginning, and the records committed as read by then.
        seen_at: When a reader saw the record at a place, in seconds after the beginning.
        starts: The number of starts of the program.
        own_ends: The exit codes of the program where nobody had killed it.
        problems: Errors besides differences in the output; empty if the run is sound.
        seconds: The duration of the run.
    """

    records: list[OutputRecord] = field(default_factory=list)
    state: dict[str, list[str]] | None = None
    injected: list[InjectedFault] = field(default_factory=list)
    progress: list[tuple[float, int]] = field(default_factory=list)
    seen_at: dict[tuple[str, int, int], float] = field(default_factory=dict)
    starts: int = 0
    own_ends: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0


class StuckError(Exception):
    """The program makes no progress, or ends again and again."""


def run(
    job: Job,
    faults: Sequence[Fault],
    folder: Path,
    say: Callable[[str], None],
    parts: int = 1,
) -> Run:
    """Run the program until all input is read and the output stands still.

    Args:
        job: The program, with input, output and cluster.
        faults: In their order; none: an undisturbed run.
        folder: For the checkpoint, local state, and the program's log.
        say: Called with a text about each event.
        parts: The number of parts of the input; with faults, two more than faults.
    """
    outcome = Run()
    with job.cluster() as cluster, ExitStack() as opened:
        object_store = None
        if job.checkpoint:
            object_store = opened.enter_context(closing(ObjectStore(job.checkpoint)))
        servers = cluster.proxies.bootstrap_servers
        jumps = any(fault.kind in NEEDS_CLOCK for fault in faults)
        clock = clock_of(folder) if jumps else None
        settings = ProgramSettings(job.command, servers, folder, object_store, clock)
        stores = [opened.enter_context(closing(store(folder))) for store in job.stores]
        witness = Witness(cluster)
        program = Supervisor(settings, say)
        course = _Course(job, cluster, program, outcome, say, stores)
        try:
            course.go(faults, len(faults) + 2 if faults else parts)
            outcome.records = read_all(cluster)
            for store in stores:
                outcome.records += store.rows()
        except (StuckError, TimeoutError) as error:
            outcome.problems.append(str(error))
        finally:
            program.close()
            witness.close()
        if not outcome.problems:
            outcome.state = state_of(settings.checkpoint, cluster.direct)
            outcome.problems += _witnessed(witness, outcome.records)
    outcome.starts, outcome.own_ends = program.starts, program.own_ends
    outcome.seen_at = {place: at - course.began for place, at in witness.seen_at.items()}
    outcome.seconds = time.monotonic() - course.began
    return outcome


class _Course:
    """The course of a run."""

    def __init__(
        self,
        job: Job,
        cluster: Cluster,
        program: Supervisor,
        outcome: Run,
        say: Callable[[str], None],
        stores: Sequence[Store],
    ) -> None:
        self.began = time.monotonic()
        self._job, self._cluster, self._program = job, cluster, program
        self._outcome, self._say, self._stores = outcome, say, stores
        self._read = 0
        self._moved = time.monotonic()
        self._ends_then = 0
        self._lingering_since: float | None = None
        self._has_started_again = False  # because rows lingered; once in a run

    def go(self, faults: Sequence[Fault], parts: int) -> None:
        """Write the input in parts, each but the first and the last with a fault; await the end.

        With faults, the last part is written when no transaction lingers any more, or after a
        start.
        """
        feed = Feed(self._cluster, self._job.inputs, parts, PART_S)
        injector = Injector(self._cluster, self._program, self._progress)
        feed.begin(0)
        mark = 0
        for part in range(1, parts):
            fault = faults[part - 1] if part <= len(faults) else None
            if fault is None or not fault.at_once:
                self._wait_for_progress(mark)
            feed.begin(part)
            mark = self._progress()
            if fault is not None:
                self._inject(fault, injector, f"{part}/{len(faults)} {fault.kind}")
            if part == len(faults):
                self._wait_until_settled(feed)
        feed.wait()
        self._wait_for_end()

    def _inject(self, fault: Fault, injector: Injector, name: str) -> None:
        self._sleep(fault.delay_s)
        began = time.monotonic()
        self._say(name)
        hit = injector.inject(fault)
        times = began - self.began, time.monotonic() - self.began
        self._outcome.injected.append(InjectedFault(fault, *times, hit))
        self._say(f"{name}: {hit or 'there was nothing to hit'}")
        if self._program.life.exit_code is not None:
            self._program.start()

    def _wait_for_progress(self, mark: int) -> None:
        self._moved = time.monotonic()
        while self._progress() <= mark:
            self._look()
            time.sleep(POLL_S)

    def _wait_until_settled(self, feed: Feed) -> None:
        feed.wait()
        while self._settled_ends() is None and not self._has_started_again:
            self._look()
            time.sleep(POLL_S)

    def _wait_for_end(self) -> None:
        self._moved = time.monotonic()
        still_since, before = time.monotonic(), None
        while time.monotonic() - still_since < QUIET_S:
            ends = self._settled_ends()
            if ends is None or ends != before:
                still_since, before = time.monotonic(), ends
            self._look()
            time.sleep(POLL_S)

    def _settled_ends(self) -> object:
        """Return the ends of the output; None: input is unread, or a commit is under way."""
        cluster = self._cluster
        wanted = cluster.ends(cluster.inputs, committed=False)
        read = cluster.positions()
        if wanted is None or read is None:
            return None
        self._note(sum(read.values()))
        if any(read.get(where, 0) < end for where, end in wanted.items()):
            self._lingering_since = None
            return None
        ends, stable = (
            cluster.ends(cluster.outputs, committed=committed) for committed in (False, True)
        )
        if ends is None or stable is None:
            return None
        if ends == stable and None not in (seen := [store.look() for store in self._stores]):
            self._lingering_since = None
            return ends, seen
        self._start_where_rows_linger()
        return None

    def _start_where_rows_linger(self) -> None:
        now = time.monotonic()
        self._lingering_since = self._lingering_since or now
        if now - self._lingering_since > LINGER_S and not self._has_started_again:
            self._has_started_again = True  # if they are still there at the end, it is wrong
            self._say("rows linger, though all input is read: the next start has to remove them")
            self._program.life.kill_all()
            self._program.start()

    def _progress(self) -> int:
        positions = self._cluster.positions()
        if positions is not None:
            self._note(sum(positions.values()))
        return self._read

    def _note(self, read: int) -> None:
        now = time.monotonic()
        if read > self._read:
            self._read, self._moved = read, now
            self._ends_then = len(self._program.own_ends)
            self._outcome.progress.append((now - self.began, read))

    def _look(self) -> None:
        """Start the program again if it has ended; give up if it ends repeatedly, or hangs."""
        self._program.look()
        ends = [code for code in self._program.own_ends[self._ends_then :] if code]
        quiet = time.monotonic() - self._moved
        if len(ends) <= OWN_ENDS_MAX and quiet < self._job.timeout_s:
            return
        if len(ends) > OWN_ENDS_MAX:
            what = f"the program ends again and again, with codes {ends}"
        else:
            what = f"nothing has moved for {quiet:.0f} s"
        total = sum(map(len, self._job.inputs.values()))
        read = f"consumer groups have committed {self._read:,} of {total:,} records of the input"
        if not self._read:
            read += " (a query of Structured Streaming does it with the option kafka.group.id)"
        if self._cluster.silence:
            read += f", and the cluster did not answer when asked for {self._cluster.silence}"
        if open_transactions := self._cluster.waited_for():
            read += f"; {open_transactions}"
        raise StuckError(f"{what}; {read}. The end of its log:\n{self._program.tail()}")

    def _sleep(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._look()
            time.sleep(min(POLL_S, max(0.0, end - time.monotonic())))


def _witnessed(witness: Witness, records: Sequence[OutputRecord]) -> list[str]:
    """Return the records that a reader saw during the run, and that are missing at the end."""
    final = {record.place: record for record in records}
    return witness.problems + [
        f"{seen.topic}-{seen.partition} at offset {seen.offset}: a reader of committed records "
        f"saw {seen.value!r}, which is not there at the end"
        for place, seen in witness.seen.items()
        if final.get(place) != seen
    ]


def read_input(
    path: Path, partitions: int, key: str | None, began_ms: int
) -> tuple[InputRecord, ...]:
    """Return the records of a file with a JSON value on each line.

    Args:
        path: Of the file.
        partitions: How many the topic has.
        key: The field that becomes the record's key and decides on its partition, as Java's
            default partitioner has it; None: no key, and the partitions take turns.
        began_ms: The first record's timestamp; each is a millisecond after the one before.

    Raises:
        OptionError: There is no such file, or a line is not JSON or lacks the key.
    """
    texts, names = [], []
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise OptionError(f"the input {path} cannot be read: {error}") from error
    for index, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            names.append(None if key is None else str(value[key]).encode())
        except (ValueError, KeyError, TypeError) as error:
            wanted = "JSON" if key is None else f"a JSON object with the field {key!r}"
            raise OptionError(
                f"{path}, line {index + 1}: expected {wanted}, found {line[:80]!r}"
            ) from error
        texts.append(line.strip())
    if key is None:
        numbers = [index % partitions for index in range(len(texts))]
    else:
        numbers = partition_of(pa.array(names, pa.binary()), partitions, 0).tolist()
    return tuple(
        InputRecord(number, name, text, began_ms + index)
        for index, (number, name, text) in enumerate(zip(numbers, names, texts, strict=True))
    )
