"""The step that learns of the end of all event times, and the rows that event times cost."""

import logging
from collections.abc import Sequence

from tallystick.state.catalog import StepState
from tallystick.tasks.event_times import InputState, in_use
from tallystick.tasks.handed_on import first_timed, makes_rows_later
from tallystick.tasks.keyed import KeyedStep, ProcessPlan, TaskNote

logger = logging.getLogger(__name__)


def final_stage(steps: Sequence[KeyedStep]) -> int:
    """Return the step that gets the final watermark at the end of all inputs, from 1; 0: none.

    The first step with event times gets it, unless a step before has timers of the clock, which
    may still make rows.
    """
    for stage, step in enumerate(steps, 1):
        if step.event_time:
            return stage
        if makes_rows_later(step):
            return 0
    return 0


def bases_in_use(
    steps: Sequence[KeyedStep], bases: tuple[StepState, ...], source: InputState | None
) -> tuple[StepState, ...]:
    """Return what steps go on from, with the watermark that an epoch goes by; see `in_use`."""
    at = first_timed(steps)
    if source is None or at is None:
        return bases
    return (
        *bases[:at],
        in_use(bases[at], source, steps[at].watermark_rule),
        *bases[at + 1 :],
    )


def warn_of_dropped(plan: ProcessPlan, notes: Sequence[TaskNote]) -> None:
    """Warn of rows that a step dropped because of their event times."""
    early = sum(note.early for note in notes)
    late = sum(note.late for note in notes) - early
    where = (plan.base.uid, plan.checkpoint_id)
    if late:
        logger.warning(
            "step %s, epoch %d: %d rows came later than the watermark (%s ms) and were dropped",
            *where,
            late,
            plan.base.watermark_ms,
        )
    if early:
        logger.warning(
            "step %s, epoch %d: %d rows were further ahead of the clock than event_time_max_ahead "
            "(%s ms) and were dropped",
            *where,
            early,
            plan.step.event_time_max_ahead_ms,
        )
