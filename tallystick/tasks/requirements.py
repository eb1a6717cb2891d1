"""The requirements of steps, tables and lists on the state that they go on from."""

from tallystick.state.compatibility import StepRequirement
from tallystick.state.operator_state import ALL_TASKS, PLACE, WHOLE
from tallystick.tasks.keyed import KeyedStep
from tallystick.tasks.lists import ListStep
from tallystick.tasks.tables import TableStep


def wanted_of_step(step: KeyedStep) -> StepRequirement:
    """Return the requirements of a keyed step on its state."""
    return StepRequirement(
        step.uid,
        step.key.schema_text,
        step.max_parallelism,
        step.parallelism,
        step.processor.time_mode,
    )


def wanted_of_table(table: TableStep) -> StepRequirement:
    """Return the requirements of a broadcast table on its state."""
    return StepRequirement(table.uid, table.codec.key.schema_text, WHOLE.count, 1)


def wanted_of_list(list_step: ListStep, task_count: int) -> StepRequirement:
    """Return the requirements of a list state of readers."""
    return StepRequirement(list_step.uid, PLACE.schema_text, ALL_TASKS.count, task_count)
