"""The planners of a run's inputs, and the bounds of its epochs."""

from collections.abc import Mapping

from tallystick.kafka.broker import KafkaBroker
from tallystick.kafka.config import KafkaConfig
from tallystick.pipeline.compiled import PipelineRun
from tallystick.pipeline.input_planning import InputPlanner, InputPlanners
from tallystick.pipeline.planning import StreamPlanner
from tallystick.pipeline.sizing import EpochSizes, SizeLimits
from tallystick.run.query import Trigger


def sizes_of(run: PipelineRun, when: Trigger) -> EpochSizes | None:
    """Return the sizes of a run's epochs; None if the user wants all records in one epoch."""
    inputs = run.inputs
    counts = [source.options.offset_count_max if source.is_bounded else None for source in inputs]
    if all(source.is_bounded and source.options.offset_count_max is None for source in inputs):
        return None
    known = [count for count in counts if count is not None]
    limits = SizeLimits(
        interval_s=when.interval_ms / 1000,
        timeout_s=run.transaction_timeout_ms / 1000,
        task_bytes_max=min(source.options.task_bytes_max for source in inputs),
        offset_count_max=sum(known) if len(known) == len(inputs) else None,
    )
    return EpochSizes(limits)


def planners_of(
    run: PipelineRun, brokers: Mapping[KafkaConfig, KafkaBroker], accepted: frozenset[str]
) -> InputPlanners:
    """Return what plans the inputs of a run."""
    return InputPlanners(
        [
            InputPlanner(
                uid=source.uid,
                planner=StreamPlanner(brokers[source.config], source.options),
                offset_count_max=source.options.offset_count_max if source.is_bounded else None,
                takes_all=not source.waits
                or (source.is_bounded and source.options.offset_count_max is None),
                waits=source.is_timed,
            )
            for source in run.all_inputs
        ],
        accepted,
    )
