"""Rows that no reporting task wrote: what is said when they are found.

Kafka cannot tell two attempts of one task apart, since they share producer id and epoch. Before the
commit such rows cost one attempt of the epoch; after it they are visible, and a person decides.
"""

from collections.abc import Mapping

from tallystick.errors import EpochAbortedError, ForeignRowsError
from tallystick.values import TopicPartition


def miscount(
    checkpoint_id: int, reported: Mapping[TopicPartition, int], found: Mapping[TopicPartition, int]
) -> EpochAbortedError:
    """Rows of an attempt that did not report are in the transaction, or reported ones are not."""
    strays = [
        f"{partition}: last sequence reported {reported.get(partition)}, Kafka has "
        f"{found.get(partition)}"
        for partition in sorted({*reported, *found})
        if reported.get(partition) != found.get(partition)
    ]
    return EpochAbortedError(
        f"epoch {checkpoint_id}: the open transaction does not hold what the tasks "
        f"reported, so another attempt wrote into it too; it is aborted and the epoch runs again "
        f"({'; '.join(strays)})"
    )


def accepting_word(checkpoint_id: int) -> str:
    """Return what a person states to go on although the epoch holds foreign rows."""
    return f"foreign-rows-in-epoch-{checkpoint_id}"


def foreign_rows_error(
    checkpoint_id: int, foreign_rows: Mapping[TopicPartition, int]
) -> ForeignRowsError:
    """The epoch is committed, and rows that nobody reported are visible with it."""
    where = ", ".join(f"{partition}: {rows}" for partition, rows in sorted(foreign_rows.items()))
    return ForeignRowsError(
        f"epoch {checkpoint_id} is committed, with rows that no reporting task wrote "
        f"({where}): a stray task attempt wrote between the last check and the commit. They stand "
        f"after the offsets that the manifest names, and are visible. Remove or compensate them "
        f"where the output is used; then start with accept={accepting_word(checkpoint_id)!r}."
    )
