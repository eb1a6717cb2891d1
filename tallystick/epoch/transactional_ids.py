"""The transactional ids of a sink with one transaction per task; the text alone shows the owner.

    <prefix>/<sink's uid>/<task>/<slot>        tallystick-flights/kafka/3/0

Ids are pooled: the slot is Spark's number of the task's attempt, so two attempts of a task never
share an id, and no epoch makes new ones. The prefix is `tallystick-<pipeline>` unless a user chose
another one.

Invariants:
    * An id has one reading. It is read from its end, where nothing but the prefix may hold a `/`:
      neither the uid of a sink nor the name of a pipeline has one. With dashes, sink `b-c` of
      pipeline `a` and sink `c` of pipeline `a-b` would share their ids.
    * A group that keeps a token shows no reader's positions. A pipeline's own group is named like
      its prefix, so a pipeline whose name ends in `-token` has to choose another for its source.
    * An id is owned if it has exactly one of the given prefixes and one of the given sinks, with
      any task and slot: also a task that no longer exists after a scale-down.

Source: the behaviours of Flink's TransactionalIdFactory, TransactionOwnership (FLIP-511).
"""

import re
from collections.abc import Collection, Iterable
from typing import NamedTuple

from tallystick.errors import OptionError

SLOT_COUNT = 16
"""The number of attempts of one task that have an id; Spark allows `spark.task.maxFailures`, 4."""
TEXT_LENGTH_MAX = 249
"""The longest name that Kafka takes for a topic."""
SEPARATOR = "/"
ID_PREFIX = "tallystick-"
"""Stands before the pipeline's name, unless a user chose another one."""
TOKEN = "-token"
"""Follows a transactional id in the name of the group that keeps its token."""
BATCH = "batch-"
"""Begins the name that a batch write has in place of a pipeline's."""
_BATCH_NAME = re.compile(rf"{BATCH}[0-9a-f]{{16}}")


class PooledId(NamedTuple):
    """A transactional id, taken apart."""

    prefix: str
    sink: str
    task: int
    slot: int

    def __str__(self) -> str:
        return SEPARATOR.join((self.prefix, self.sink, str(self.task), str(self.slot)))


def default_prefix(pipeline: str) -> str:
    """Return the default prefix of a pipeline; rights on it cover its token groups too."""
    return f"{ID_PREFIX}{pipeline}"


def transactional_id(prefix: str, sink: str, task: int, slot: int) -> str:
    """Return the transactional id of a task attempt in a sink."""
    assert prefix, "an empty prefix owns everybody's ids"
    assert sink, "a sink without a uid"
    assert SEPARATOR not in sink, sink
    assert task >= 0, task
    assert 0 <= slot < SLOT_COUNT, slot
    return str(PooledId(prefix, sink, task, slot))


def checkpoint_prefix(prefix: str, lineage: str) -> str:
    """Return the prefix of a checkpoint's ids, below the pipeline's prefix.

    Each checkpoint has its own log of decisions, so two of them under one pipeline name do not
    fence each other: with ids in common one would abort what the other has decided.
    """
    return f"{prefix}{SEPARATOR}{lineage}"


def token_group(transactional_id: str) -> str:
    """Return the consumer group under which transactions of an id keep their token."""
    return f"{transactional_id}{TOKEN}"


def token_owner(group: str) -> str:
    """Return the pipeline whose token a group keeps, if it chose no prefix; "": none."""
    name = group.removeprefix(ID_PREFIX)
    return name.removesuffix(TOKEN) if name != group and name.endswith(TOKEN) else ""


def batch_name(nonce: str) -> str:
    """Return the name of a batch write, which no other write has.

    Args:
        nonce: 16 hexadecimal digits, drawn for the write.
    """
    name = f"{BATCH}{nonce}"
    assert is_batch_name(name), nonce
    return name


def is_batch_name(name: str) -> bool:
    """True if a name, in place of a pipeline's, is a batch write's."""
    return _BATCH_NAME.fullmatch(name) is not None


def text_problem(text: object) -> str:
    """Return the reason why a text may be no part of an id or a group in Kafka; "" if it may.

    Kafka takes any text. A character that cannot be seen is a mistake or a trap: two names that
    look the same would differ.
    """
    if isinstance(text, str) and 0 < len(text) <= TEXT_LENGTH_MAX and text.isprintable():
        return ""
    return f"expected up to {TEXT_LENGTH_MAX} characters that can be printed"


def check_name(pipeline: str) -> None:
    """Refuse a name whose transactional id could be read as that of another pipeline's task.

    Raises:
        OptionError: the name has a separator in it, or cannot be printed.
    """
    if problem := text_problem(pipeline):
        raise OptionError(f"name={pipeline!r}: {problem}")
    if SEPARATOR in pipeline:
        raise OptionError(
            f"pipeline name {pipeline!r} (a query's own, where KafkaSink has no name=): expected "
            f"none with {SEPARATOR!r}, which separates the parts of transactional ids. Give "
            f"KafkaSink another name="
        )


def slot_of(attempt: int, task: int) -> int:
    """Return the slot of an attempt.

    Raises:
        OptionError: the task has used up its ids.
    """
    if attempt >= SLOT_COUNT:
        raise OptionError(
            f"attempt {attempt} of task {task}: a task has {SLOT_COUNT} transactional ids, one for "
            f"each attempt, and attempts 0 to {SLOT_COUNT - 1} had theirs. Find out why they "
            f"failed, and lower spark.task.maxFailures to {SLOT_COUNT} or less."
        )
    return attempt


def parse(transactional_id: str) -> PooledId | None:
    """Take an id apart; None if it is none of ours."""
    parts = transactional_id.rsplit(SEPARATOR, 3)
    if len(parts) != 4 or not all(_is_number(part) for part in parts[2:]):
        return None
    prefix, sink, task, slot = parts
    if not prefix or not sink:
        return None
    return PooledId(prefix, sink, int(task), int(slot))


def _is_number(text: str) -> bool:
    """True if the text is a number just as we write numbers, so that each id has a single text."""
    return text.isascii() and text.isdigit() and str(int(text)) == text


def owned(
    listed: Iterable[str], prefixes: Collection[str], sinks: Collection[str]
) -> tuple[PooledId, ...]:
    """Return the transactional ids that belong to the given sinks of a pipeline, sorted.

    Args:
        listed: all ids that the cluster names.
        prefixes: every prefix that the pipeline has ever used.
        sinks: the uids of the sinks.
    """
    parsed = (parse(listed_id) for listed_id in listed)
    return tuple(
        sorted(
            pooled
            for pooled in parsed
            if pooled is not None and pooled.prefix in prefixes and pooled.sink in sinks
        )
    )
