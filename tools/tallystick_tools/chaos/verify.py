"""The whole of `tallystick chaos`: undisturbed, disturbed, compared, explained, shortened."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tallystick.errors import OptionError
from tallystick_tools.chaos.clock import find_compiler
from tallystick_tools.chaos.cluster import InputRecord
from tallystick_tools.chaos.compare import (
    COMPARISONS,
    Comparison,
    Difference,
    differences,
    explain,
    state_differences,
)
from tallystick_tools.chaos.files import ParquetFiles
from tallystick_tools.chaos.lake import LakeTables
from tallystick_tools.chaos.program import FILES
from tallystick_tools.chaos.run import InjectedFault, Job, Run, Store, read_input, run
from tallystick_tools.chaos.schedule import Fault, as_json, kinds_for, plan, read_schedule
from tallystick_tools.chaos.tables import Tables

AROUND_S = 10.0
"""The longest time from a fault to a difference that it may have made."""
SHRINK_RUNS_MAX = 20
SMALLEST = "smallest.json"
UNDISTURBED = "the undisturbed run: "


Lakes = tuple[Sequence[str], Sequence[str]]
"""The names of Delta tables, and those of Iceberg tables."""


@dataclass(frozen=True, slots=True)
class Question:
    """A program, the faults to survive, and the rule by which two outputs count as the same.

    Args:
        job: The program, its input and its cluster.
        faults: Their schedule.
        again: The options that give this schedule again.
        comparison: The rule by which two outputs count as the same.
        shrink: Whether to look for a smaller schedule if the output differs.
    """

    job: Job
    faults: tuple[Fault, ...]
    again: str
    comparison: Comparison = "sequence"
    shrink: bool = False


def question_of(
    command: Sequence[str],
    *,
    inputs: Mapping[str, str | Path],
    outputs: Sequence[str] = (),
    writes_files: bool = False,
    lakes: Lakes = ((), ()),
    tables: Collection[str] = (),
    postgres: str = "",
    keys: Mapping[str, str] | None = None,
    kills: int = 20,
    seed: int = 1,
    kinds: Collection[str] = (),
    schedule: str | Path | None = None,
    compare: str = "sequence",
    brokers: int = 1,
    partitions: int = 4,
    transaction_version: int | None = None,
    timeout_s: float = 180.0,
    bootstrap_servers: str = "",
    checkpoint: str = "",
    shrink: bool = False,
) -> Question:
    """Return a question, checked, with its input read.

    Args:
        command: The program and its arguments; {servers} and its like are filled in.
        inputs: By topic, a file with a JSON value on each line.
        outputs: The topics that the program writes.
        writes_files: Whether it writes Parquet files below {files}.
        lakes: The Delta and the Iceberg tables that it writes, see `LakeTables`.
        tables: Those of PostgreSQL that it writes, which are emptied before each run.
        postgres: The DSN of their database.
        keys: By topic, the field of the input's values that becomes the record's key.
        kills: How many faults.
        seed: Of their schedule.
        kinds: Of faults; none: all that fit.
        schedule: A file with the faults themselves, instead of `kills`, `seed` and `kinds`.
        compare: What counts as the same, one of `COMPARISONS`.
        brokers: One or three, of an embedded cluster.
        partitions: Of each topic.
        transaction_version: See `EmbeddedKafka`.
        timeout_s: How long a run may go without progress.
        bootstrap_servers: A cluster to use instead of an embedded one.
        checkpoint: A folder in an object store for checkpoints; "": they are on the local disk.
        shrink: Whether to look for a smaller schedule if the output differs.

    Raises:
        OptionError: A value that cannot work, or a file that cannot be read.
    """
    brokers = _brokers(brokers, transaction_version, bootstrap_servers)
    job = Job(
        tuple(command),
        _records(inputs, keys or {}, partitions),
        tuple(outputs),
        partitions,
        brokers,
        transaction_version,
        timeout_s,
        bootstrap_servers,
        checkpoint,
        _stores(outputs, writes_files, lakes, tables, postgres),
    )
    if schedule is None:
        faults = plan(kills, seed, _kinds_for(job, kinds))
        again = f"--seed {seed} --kills {kills}" + f" --faults {','.join(kinds)}" * bool(kinds)
    else:
        faults, again = read_schedule(Path(schedule)), f"--schedule {schedule}"
        _kinds_for(job, {fault.kind for fault in faults})
    return Question(job, faults, again, comparison_of(compare), shrink)


def comparison_of(named: str) -> Comparison:
    """Return the comparison that a user names.

    Raises:
        OptionError: There is no such comparison.
    """
    for comparison in COMPARISONS:
        if comparison == named:
            return comparison
    raise OptionError(f"compare={named!r}: expected one of {', '.join(COMPARISONS)}")


def _kinds_for(job: Job, named_kinds: Collection[str]) -> tuple[str, ...]:
    uses_parallelism = any("{parallelism}" in argument for argument in job.command)
    return kinds_for(
        job.brokers,
        named_kinds,
        uses_parallelism,
        bool(job.checkpoint),
        find_compiler() is not None,
    )


def _stores(
    outputs: Sequence[str],
    writes_files: bool,
    lakes: Lakes,
    tables: Collection[str],
    postgres: str,
) -> tuple[Callable[[Path], Store], ...]:
    if not (outputs or writes_files or any(lakes) or tables):
        raise OptionError("a program is judged by its output: expected a topic, files or a table")
    if bool(tables) != bool(postgres):
        raise OptionError("tables and the DSN of their database belong together")
    stores: list[Callable[[Path], Store]] = []
    if writes_files:
        stores.append(lambda folder: ParquetFiles(folder / FILES))
    if any(lakes):
        stores.append(lambda folder: LakeTables(folder / FILES, *lakes))
    if tables:
        stores.append(lambda folder: Tables(postgres, [*tables]))
    return tuple(stores)


def _brokers(brokers: int, transaction_version: int | None, bootstrap_servers: str) -> int:
    if brokers not in (1, 3):
        raise OptionError(f"brokers={brokers}: expected 1 or 3")
    if not bootstrap_servers:
        return brokers
    if brokers > 1 or transaction_version is not None:
        raise OptionError("brokers and transaction version of a given cluster are its own")
    return 0


def _records(
    inputs: Mapping[str, str | Path], keys: Mapping[str, str], partitions: int
) -> dict[str, tuple[InputRecord, ...]]:
    if stray := sorted({*keys} - {*inputs}):
        raise OptionError(f"keys of {', '.join(stray)}, which is no topic of the input")
    began_ms = int(time.time() * 1000)
    return {
        topic: read_input(Path(file), partitions, keys.get(topic), began_ms)
        for topic, file in inputs.items()
    }


@dataclass
class Verdict:
    """The answer to a question.

    Args:
        question: The question.
        expected: The undisturbed run.
        disturbed: The run with faults.
        differences: The differences between their outputs.
        problems: All other errors: in state, seen by readers, a program that hangs.
        explanation: Of the differences; "": no differences.
        smallest: The smallest known schedule that fails; empty if none was searched for.
        smallest_file: The file with that schedule, for `--schedule`.
    """

    question: Question
    expected: Run
    disturbed: Run
    differences: list[Difference] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    explanation: str = ""
    smallest: tuple[Fault, ...] = ()
    smallest_file: Path | None = None

    @property
    def is_exact(self) -> bool:
        """True if no row is lost, added, out of order, or wrong, and no problem was found."""
        return not self.differences and not self.problems

    @property
    def hits(self) -> list[InjectedFault]:
        """The faults that hit a target."""
        return [injected for injected in self.disturbed.injected if injected.hit]

    @property
    def compared_state(self) -> dict[str, list[str]] | None:
        """The state of the disturbed run; None: the state was not compared."""
        return None if self.expected.state is None else self.disturbed.state

    def around(self, difference: Difference) -> list[InjectedFault]:
        """Return the faults shortly before the time at which a reader saw a row."""
        place = difference.topic, difference.partition, difference.offset
        at = self.disturbed.seen_at.get(place)
        if at is None:
            return []
        return [hit for hit in self.hits if hit.began_s - 1 <= at <= hit.ended_s + AROUND_S]


def verify(question: Question, folder: Path, say: Callable[[str], None]) -> Verdict:
    """Run the program undisturbed and under faults, and compare.

    Args:
        question: The program, the faults and the rule of comparison.
        folder: For checkpoints and logs; one folder in it for each run.
        say: Called with a text about each event.
    """
    say("undisturbed run")
    expected = run(question.job, (), folder / "undisturbed", say)
    if expected.problems:
        problems = [UNDISTURBED + problem for problem in expected.problems]
        return Verdict(question, expected, Run(), problems=problems)
    if not expected.records:
        what = "it wrote nothing into its output"
        if question.job.outputs:
            what += f" ({', '.join(question.job.outputs)})"
        return Verdict(question, expected, Run(), problems=[UNDISTURBED + what])
    say(f"{len(expected.records):,} records of output; now with {len(question.faults)} faults")
    disturbed = run(question.job, question.faults, folder / "faults", say)
    verdict = judged(question, expected, disturbed)
    if not verdict.is_exact and not disturbed.problems:
        say("there are differences; a second undisturbed run tells whether there always are")
        parts = len(question.faults) + 1  # other epochs than in the first run
        again = run(question.job, (), folder / "undisturbed-again", say, parts)
        if not again.problems:
            drop_unlike_state(expected, again)
            verdict = judged(question, expected, disturbed)
        if verdict.differences and not again.problems:
            verdict.explanation = explain(
                expected.records, again.records, disturbed.records, question.comparison
            )
    if not verdict.is_exact and question.shrink:
        verdict.smallest = shrink(
            question.faults,
            lambda faults, name: _fails(question, expected, faults, folder / name, say),
        )
        verdict.smallest_file = folder / SMALLEST
        verdict.smallest_file.write_text(as_json(verdict.smallest))
    return verdict


def judged(question: Question, expected: Run, disturbed: Run) -> Verdict:
    """Compare a run with the undisturbed one."""
    verdict = Verdict(question, expected, disturbed, problems=list(disturbed.problems))
    if not disturbed.problems:
        verdict.differences = differences(expected.records, disturbed.records, question.comparison)
        if expected.state is not None and disturbed.state is not None:
            verdict.problems += state_differences(expected.state, disturbed.state)
    return verdict


def drop_unlike_state(expected: Run, again: Run) -> None:
    """Compare no state if it differs between two undisturbed runs: it depends on epochs' ends.

    Rows that wait for others are an example: they are removed an epoch after the watermark passed.
    """
    if expected.state is None or again.state is None:
        return
    if state_differences(expected.state, again.state):
        expected.state = None


def _fails(
    question: Question,
    expected: Run,
    faults: Sequence[Fault],
    folder: Path,
    say: Callable[[str], None],
) -> bool:
    say(f"does it fail with {len(faults)} of the faults?")
    fails = not judged(question, expected, run(question.job, faults, folder, say)).is_exact
    say(f"with {len(faults)} faults it {'fails' if fails else 'is exact'}")
    return fails


def shrink(
    faults: Sequence[Fault], fails: Callable[[Sequence[Fault], str], bool]
) -> tuple[Fault, ...]:
    """Return a smaller schedule that still fails: without halves, quarters, then single faults.

    Args:
        faults: A schedule that fails.
        fails: Runs a schedule under the name of a folder, and returns whether it fails.
    """
    known, size, runs = list(faults), len(faults) // 2, 0
    while size > 0:
        at = 0
        while at < len(known) and len(known) > size and runs < SHRINK_RUNS_MAX:
            runs += 1
            smaller = known[:at] + known[at + size :]
            if fails(smaller, f"smaller-{runs}"):
                known = smaller
            else:
                at += size
        size //= 2
    return tuple(known)
