"""The error tree: a class stands for what the reader has to do, not for where it happened.

    OptionError      fix the setting; nothing was started
    RetriableError   the shell tries again until its deadline; users see it only inside another
    FencedError      a newer run owns the pipeline: this one must stop, and has done no harm
    DataLossError    going on would lose or repeat records; a person decides how
    FunctionError    a function of the user's failed; it names step, records and the user's line
    RecordError      a record cannot be read or written as asked; it names topic, partition, offset
    StateError       a function used its state in a way that cannot be; it names state and value

Every message names the thing, what was found, what was expected, and what to do.
"""

from typing import ClassVar

NOT_SHOWN = (
    "The message is in the driver's log. It is not shown here, since it may hold values of records."
)


UNREADABLE = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError),
    *(TypeError, ValueError),
)
"""Raised by Python where bytes from outside are not as they were written: no JSON, another shape of
it, or a value that must not exist."""


class TallystickError(Exception):
    """Base class of the errors that Tallystick raises.

    Args:
        message: the whole message, for the log and for the caller that started the pipeline.
        without_values: the message without values of records or state, for a page; "": the class
            says (`MAY_HOLD_VALUES`) if the whole message may be shown.
    """

    MAY_HOLD_VALUES: ClassVar[bool] = False
    """True if messages may hold values of records or state."""

    def __init__(self, message: str = "", *, without_values: str = "") -> None:
        super().__init__(message)
        self.without_values = without_values or (NOT_SHOWN if self.MAY_HOLD_VALUES else message)


class OptionError(TallystickError):
    """A setting, or the state of the cluster it is checked against, cannot work: fix it first."""


class StepMissingError(OptionError, AttributeError):
    """A pipeline lacks a step that the called method needs before it."""


class NeedsSparkError(OptionError):
    """Only a running Spark can tell whether a setting can work."""


class UnknownNameError(TallystickError, AttributeError):
    """A class, or the package, has no attribute of a name; the message says which is meant."""


class QueryEndedError(TallystickError):
    """The streaming query that a call belongs to has ended: nothing was written."""


class RetriableError(TallystickError):
    """A passing failure outside of the pipeline; the same call may succeed later."""


class BrokerUnavailableError(RetriableError):
    """Kafka did not give a usable answer before the deadline; whether it acted is unknown."""


class EpochAbortedError(RetriableError):
    """The open transaction can no longer be committed; the epoch has to run again."""


class WorkerOrphanedError(EpochAbortedError):
    """The process that started this worker of Spark's is gone; Spark must take another worker."""


class RegistryUnavailableError(RetriableError):
    """Schemas of values cannot be looked up now."""


class StorageError(RetriableError):
    """The checkpoint storage refused a read or a write."""


class FencedError(TallystickError):
    """Another run has taken over the pipeline's transactional id."""


class SparkLogError(RetriableError):
    """Spark's log has other offsets than the manifest of a committed epoch.

    The log is put right, as the manifest has it, before this is raised: start again.
    """

    def __init__(self, message: str, checkpoint_id: int, sources: tuple[str, ...]) -> None:
        super().__init__(message)
        self.checkpoint_id = checkpoint_id
        self.sources = sources


class SecondCallError(OptionError):
    """The function of `foreachBatch` called a sink twice in one micro-batch."""


class AuthorizationError(OptionError):
    """Kafka refused the credentials, or they lack an ACL."""


class DataLossError(TallystickError):
    """Going on would lose or repeat records silently. Do not catch it: a person decides."""


class ManifestError(DataLossError):
    """A manifest is missing, damaged, or not the manifest that the checkpoint must have."""


class StateFileError(ManifestError):
    """A file of keyed state that a manifest names is missing or damaged."""


class OtherOffsetsError(ManifestError):
    """The caller has other end offsets of a committed epoch than its manifest.

    Args:
        committed: the pipeline, the epoch and the manifest, as the beginning of a sentence.
        checkpoint_id: the epoch.
        sources: the end offsets in the manifest.
        logged: the end offsets that the caller has.
    """

    def __init__(
        self,
        committed: str,
        checkpoint_id: int,
        sources: tuple[str, ...],
        logged: tuple[str, ...] | None,
    ) -> None:
        super().__init__(f"{committed}, but {logged} was asked for")
        self.committed = committed
        self.checkpoint_id = checkpoint_id
        self.sources = sources
        self.logged = logged


class RecordsExpiredError(DataLossError):
    """Records were deleted, by retention or by hand, before they were read."""


class PartitionRemovedError(DataLossError):
    """A partition that is being read is gone."""


class TopicRecreatedError(DataLossError):
    """A topic was deleted and created again: its offsets mean other records now (KIP-516)."""


class LogTruncatedError(DataLossError):
    """A log ends before the next offset to read: an unclean leader election, or lost disks."""


class ForeignRowsError(DataLossError):
    """A committed transaction holds rows that no reporting task wrote."""


class RecordError(TallystickError):
    """A record does not have the format that the pipeline expects."""

    MAY_HOLD_VALUES = True


class CorruptRecordError(RecordError):
    """The bytes of a record batch are damaged, or of a format this release does not read."""

    MAY_HOLD_VALUES = False


class StateError(TallystickError):
    """A value does not fit the state that it was put into, or a call came at the wrong moment."""

    MAY_HOLD_VALUES = True


class FunctionError(TallystickError):
    """A function of the user's raised an error, whose class the instance has too.

    So `except KeyError` takes the error of a function that raised a KeyError.

    Args:
        message: the step, the records, the error and the user's line.
    """

    MAY_HOLD_VALUES = True

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        """Return the message: classes such as KeyError would quote it."""
        return self.message

    def __repr__(self) -> str:
        """Return class and message; the arguments are those of the user's error."""
        return f"{type(self).__name__}({self.message!r})"


class BrokenInvariantError(TallystickError):
    """A bug of ours: please report it with the message."""


def without_values(error: BaseException) -> str:
    """Return the text of an error without values of records or state, for pages and answers."""
    return error.without_values if isinstance(error, TallystickError) else NOT_SHOWN
