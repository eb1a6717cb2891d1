"""The meaning of each error, and the remedy: one table, for the page of a run and for the docs.

Commands name what only the reader knows in capitals.
"""

import shlex
from dataclasses import dataclass

from tallystick.errors import (
    AuthorizationError,
    BrokenInvariantError,
    BrokerUnavailableError,
    CorruptRecordError,
    DataLossError,
    EpochAbortedError,
    FencedError,
    ForeignRowsError,
    FunctionError,
    ManifestError,
    OptionError,
    RecordError,
    RetriableError,
    SecondCallError,
    SparkLogError,
    StateError,
    StateFileError,
    StorageError,
    TallystickError,
)

CHECKPOINT = "CHECKPOINT"
_DOCTOR = f"tallystick doctor {CHECKPOINT} --bootstrap-servers SERVERS"


@dataclass(frozen=True, slots=True)
class Remedy:
    """One row of the table.

    Args:
        errors: classes, with those of their subclasses that have no row.
        meaning: why it is raised.
        action: what to do.
        command: what to type; "": nothing.
        link: where the docs say more, in Markdown; "": nowhere.
    """

    errors: tuple[type[BaseException], ...]
    meaning: str
    action: str
    command: str = ""
    link: str = ""

    def command_for(self, checkpoint: str) -> str:
        """Return the command with the location of a checkpoint in its place."""
        return self.command.replace(CHECKPOINT, shlex.quote(checkpoint))


REMEDIES = (
    Remedy(
        (OptionError, AuthorizationError),
        "A setting, a right or the cluster does not allow what the pipeline asks for.",
        "Fix the setting, or add the ACL, that it names; this finds others:",
        _DOCTOR,
    ),
    Remedy(
        (BrokerUnavailableError, StorageError, RetriableError),
        "Kafka, the checkpoint's storage or another system did not answer in time. Nothing is "
        "lost: the epoch runs again.",
        "If the run has ended, start it again when the system is back. This says what answers:",
        _DOCTOR,
    ),
    Remedy(
        (EpochAbortedError,),
        "The epoch's transaction cannot be committed: it timed out, or a worker died. Nothing of "
        "it is visible, and the epoch runs again.",
        "If it comes back: a longer transaction_timeout_ms, or smaller epochs "
        "(max_offsets_per_trigger). This shows ages and timeouts:",
        f"tallystick transactions list --bootstrap-servers SERVERS --checkpoint {CHECKPOINT}",
    ),
    Remedy(
        (SparkLogError,),
        "Spark's log differed from the manifests (Structured Streaming), and was put right.",
        "Start again. Should it come again, two drivers use one checkpoint.",
    ),
    Remedy(
        (SecondCallError,),
        "The function of foreachBatch called a sink twice in one micro-batch.",
        "Call each sink once per micro-batch.",
        link="[In a query of your own](writing-exactly-once.md#in-a-query-of-your-own)",
    ),
    Remedy(
        (FencedError,),
        "Another run owns the pipeline now. This one stopped, and has done no harm.",
        "Find the other run and keep one. If there is none, start again.",
        link="[how that can be](guarantees.md#where-a-guard-has-an-edge)",
    ),
    Remedy(
        (StateFileError,),
        "A file of keyed state is missing or damaged.",
        "Put it back, or go back to the epoch that it names. This lists all that is wrong:",
        f"tallystick inspect {CHECKPOINT} --verify",
        "[Savepoints](savepoints.md#if-a-file-of-state-is-missing-or-damaged)",
    ),
    Remedy(
        (StateError,),
        "A function put a value into a state that does not fit. Nothing of the epoch counts.",
        "Mend the function, or declare the state as it names it; then start again.",
    ),
    Remedy(
        (RecordError,),
        "A record is not what the pipeline expects. Nothing of the epoch counts.",
        "Look at the record that it names; then choose a mode (permissive, dropmalformed, "
        "deadletter), or mend the function:",
        "kafka-console-consumer --bootstrap-server SERVERS --topic T --partition P --offset O "
        "--max-messages 1",
    ),
    Remedy(
        (CorruptRecordError,),
        "The bytes of a record batch are damaged on a broker's disk or on their way; or a faulty "
        "producer wrote them so, where the message says that the checksum is right.",
        "Mend the producer and, to go on, leave its batch out: LossPolicy(unreadable='skip'). "
        "Where it is damage, compare the replicas of the partition that it names; one that is made "
        "again heals:",
        "kafka-dump-log --deep-iteration --files SEGMENT",
    ),
    Remedy(
        (DataLossError, ManifestError),
        "Going on would lose or repeat records, so the run stopped.",
        "Read it: it names the ways on; some ask you to state a decision with accept=. Look first:",
        _DOCTOR,
    ),
    Remedy(
        (ForeignRowsError,),
        "Rows stand in the output that no task reported.",
        "Remove or compensate them, then start with the accept= that it names.",
    ),
    Remedy(
        (BrokenInvariantError,),
        "This is a bug of Tallystick.",
        "Please report it, with the message and the log.",
    ),
    Remedy(
        (FunctionError,),
        "A function of yours, or Spark for it, raised an error, whose class it has too. Nothing of "
        "the epoch counts.",
        "The message names the step, the records and your line: mend that, and start again.",
    ),
    Remedy(
        (TallystickError, Exception),
        "A library or Spark raised it. Nothing of the epoch counts.",
        "The driver's log has the message, and the line that raised it: mend that, and start "
        "again.",
    ),
)
"""In the order of the docs."""


def remedy_of(kind: type[BaseException]) -> Remedy:
    """Return the row of an error's class, or of the nearest class above it."""
    rows = {error: row for row in REMEDIES for error in row.errors}
    return next((rows[error] for error in kind.__mro__ if error in rows), rows[Exception])


def page() -> str:
    """Return the table in Markdown."""
    lines = ["| error | means | what to do |", "| --- | --- | --- |"]
    for row in REMEDIES:
        names = ", ".join("any other" if error is Exception else f"`{error.__name__}`"
                          for error in row.errors)  # fmt: skip
        parts = (row.action, row.command and f"`{row.command}`", row.link and f"({row.link})")
        lines.append(f"| {names} | {row.meaning} | {' '.join(filter(None, parts))} |")
    return "\n".join(lines)
