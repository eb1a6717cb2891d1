"""The pipeline of a world: what its seed gives it, unless a test wants something else."""

from dataclasses import dataclass

from tallystick.epoch.manifest import CHECKPOINT, KAFKA
from tests.simulation.faults import RECENT_FROM

KEYED_EVERY = 5
"""Of so many seeds one has a keyed step: that takes ten times as long."""
TWO_INPUTS_EVERY = 2 * KEYED_EVERY
"""Of these half have two inputs."""
SINKS_EVERY = 4
"""Of so many seeds without a keyed step one has other sinks."""
QUERY_EVERY = 3
"""Of so many seeds one has a query of Spark's, if it has nothing that only pipelines have."""
GANG_SPAN = 12
"""Of four spans of seeds with loops three have resident tasks."""
KEYED_DECIDERS = ("", KAFKA, CHECKPOINT)
"""Who decides where there is a keyed step, in turn."""
RECOVERED = 2
"""Seeds that end so, and that have a loop, are recovered before each run."""


OPERATOR_STATE_EVERY, OPERATOR_STATE_TURN = 3, 1
"""One seed in so many has lists and a table, if it has a keyed step, or resident tasks alone."""
END_EVERY = 4
"""Of so many keyed worlds with two inputs one has an end, if it has windows and no lists."""


@dataclass(frozen=True)
class Pipeline:
    """What a pipeline has.

    Args:
        is_keyed: a keyed step.
        decided_by: other sinks, and this decides for them, as manifests name it; empty: it has
            none.
        has_loop: a loop of our own plans epochs, as for all that queries lack.
        has_gang: a loop's tasks are resident.
        has_two_inputs: the keyed step has two, and event time.
        has_windows: a second keyed step, with windows of event time.
        recovers: it is recovered before each run, by a driver of its own.
        has_operator_state: its readers have lists and a table.
        has_end: both inputs end with what is there when the last run of the storm starts.
    """

    is_keyed: bool
    decided_by: str
    has_loop: bool
    has_gang: bool
    has_two_inputs: bool
    has_windows: bool
    recovers: bool
    has_operator_state: bool
    has_end: bool


def pipeline_of(
    seed: int,
    is_keyed: bool | None = None,
    decided_by: str | None = None,
    has_loop: bool | None = None,
    has_gang: bool | None = None,
    has_two_inputs: bool | None = None,
    has_windows: bool | None = None,
    recovers: bool | None = None,
    has_operator_state: bool | None = None,
    has_end: bool | None = None,
) -> Pipeline:
    """Return the pipeline of a seed's world; what is not None is as a test wants it."""
    is_free = is_keyed is None
    if is_keyed is None:
        is_keyed = seed % KEYED_EVERY == 1
    turn = seed // TWO_INPUTS_EVERY  # of keyed worlds of each kind of input
    if has_two_inputs is None:
        has_two_inputs = is_free and seed % TWO_INPUTS_EVERY == KEYED_EVERY + 1
    if has_windows is None:
        has_windows = is_free and is_keyed and turn % 2 == 1
    if decided_by is None and is_keyed:
        decided_by = KEYED_DECIDERS[turn % len(KEYED_DECIDERS)] if is_free else ""
    elif decided_by is None:
        decided_by = deciders(seed)
    if has_loop is None or is_keyed:
        has_loop = is_keyed or seed % QUERY_EVERY != 0 or decided_by == KAFKA
    if has_gang is None:
        has_gang = seed // GANG_SPAN % 4 != 0
    if recovers is None:
        recovers = is_free and (seed % TWO_INPUTS_EVERY == RECOVERED or (is_keyed and not turn % 4))
    has_gang = has_gang and has_loop
    if has_operator_state is None:
        has_operator_state = is_free and seed % OPERATOR_STATE_EVERY == OPERATOR_STATE_TURN
    has_readers = is_keyed or (has_gang and not decided_by)
    has_operator_state = has_operator_state and has_readers
    if has_end is None:
        has_end = is_free and seed >= RECENT_FROM and turn % END_EVERY == 1
    return Pipeline(
        is_keyed,
        decided_by,
        has_loop,
        has_gang,
        has_two_inputs,
        has_windows,
        recovers and has_loop,
        has_operator_state,
        has_end and has_two_inputs and has_windows and not has_operator_state,
    )


def deciders(seed: int) -> str:
    """Who decides in the world of a seed without a keyed step; empty: it has no other sinks."""
    if seed % SINKS_EVERY != SINKS_EVERY - 1:
        return ""
    return KAFKA if seed // SINKS_EVERY % 2 else CHECKPOINT
