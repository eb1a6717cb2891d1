"""The planners of a run's inputs, and the bounds of its epochs."""

from collections.abc import Mapping

from tallystick.kafka.broker import KafkaBroker
from tallystick.kafka.config import KafkaConfig
from tallystick.pipeline.compiled import PipelineRun
from tallystick.pipeline.input_planning import InputPlanner, InputPlanners
from tallystick.pipeline.planning import StreamPlanner
from tallystick.pipeline.sizing import EpochSizes, SizeLimits
from tallystick.run.loop import Trigger


def sizes_of(run: PipelineRun, when: Trigger) -> EpochSizes | None:
    """Return the sizes of a run's epochs; None if the user wants all records in one epoch."""
    its = run.inputs
    counts = [each.options.offset_count_max if each.is_bounded else None for each in its]
    if all(each.is_bounded and each.options.offset_count_max is None for each in its):
        return None
    known = [each for each in counts if each is not None]
    limits = SizeLimits(
        interval_s=when.interval_ms / 1000,
        timeout_s=run.transaction_timeout_ms / 1000,
        task_bytes_max=min(each.options.task_bytes_max for each in its),
        offset_count_max=sum(known) if len(known) == len(its) else None,
    )
    return EpochSizes(limits)


def planners_of(
    run: PipelineRun, brokers: Mapping[KafkaConfig, KafkaBroker], accepted: frozenset[str]
) -> InputPlanners:
    """Return what plans the inputs of a run."""
    return InputPlanners(
        [
            InputPlanner(
                uid=each.uid,
                planner=StreamPlanner(brokers[each.config], each.options),
                offset_count_max=each.options.offset_count_max if each.is_bounded else None,
                takes_all=not each.waits
                or (each.is_bounded and each.options.offset_count_max is None),
                waits=each.is_timed,
            )
            for each in run.all_inputs
        ],
        accepted,
    )
