"""State from a table, for a savepoint that exists or for a pipeline that has none yet."""

from collections.abc import Mapping, Sequence
from typing import Any

from tallystick.api.in_process import refuse_in_process
from tallystick.api.pipeline import Pipeline
from tallystick.arguments import checked
from tallystick.errors import OptionError
from tallystick.ops import state_writing
from tallystick.spark.cluster import Cluster
from tallystick.storage.places import Place


@checked
def write_state(
    rows: Any,
    savepoint: Place | None,
    step: str,
    *,
    to: Place,
    key: Sequence[str] | None = None,
    offsets: Mapping[str, Mapping[int, int]] | None = None,
    pipeline: Pipeline | None = None,
    scratch: Place | None = None,
) -> None:
    """Write a savepoint in which the state of a step is what a table says.

    The table replaces all state of the step: a key without a row has none. Columns are those of
    `read_state`, with the same types, in any order; `key_group` may be left out, and is computed in
    any case, and so may `timers`. Columns of elements with a `$`, such as `$expiry`, may be null in
    new elements. Everything else is as in the given savepoint, which stays as it
    is. The rows are in memory as a whole. After an error the new folder is as empty as before.

    Args:
        rows: an Arrow table, a Polars frame, or a DataFrame of Spark's, which is collected.
        savepoint: the savepoint with the positions, the declared states and all other steps; None:
            there is none, and the pipeline begins to read where its sources say.
        step: the uid of the step.
        to: the new savepoint's folder, empty.
        key: the columns of another key, in the order of the new program's `key_by`; their types
            are the table's. None: the key stays.
        offsets: the next offset to read by topic and partition, in place of the savepoint's.
        pipeline: the program whose step it is, where the savepoint has no state of that step.
        scratch: a folder on a local disk with room for the step's state; None: the system's
            temporary one.

    Raises:
        OptionError: there is no such step, or a column is missing, unknown or of another type; or a
            key is there twice, or elements are there that no such step would have written.
        StateFileError: a file of another step's state is missing or damaged.
    """
    if savepoint is None and pipeline is None:
        raise OptionError(
            "write_state: neither savepoint= nor pipeline= is given: expected the savepoint to "
            "begin with, or the program whose first state the table is"
        )
    program = state_writing.Program()
    if pipeline is not None:
        refuse_in_process(pipeline)
        steps = pipeline._compiled(Cluster.at_hand(None)).keyed.check(())
        program = state_writing.Program(pipeline.name, steps)
    state_writing.write_table(
        rows,
        savepoint,
        step,
        to=to,
        key=key,
        offsets=offsets or {},
        program=program,
        scratch=scratch,
    )
