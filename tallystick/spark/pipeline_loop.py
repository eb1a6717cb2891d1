"""A pipeline in a loop of our own: no query of Spark's, no log but the manifests.

Spark runs the tasks: each epoch is a job. What Structured Streaming did is here: the planner lives
in the driver, an epoch is planned behind the fence, and where it begins stands in the manifest of
the one before.
"""

import json
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pyspark import SparkContext

from tallystick.checkpoint import manifest as m
from tallystick.checkpoint.facts import Identity
from tallystick.checkpoint.refusals import begins_nowhere
from tallystick.errors import TallystickError
from tallystick.kafka.broker import KafkaBroker
from tallystick.options import parse_source_options
from tallystick.ports import Engine, PlannedEpoch
from tallystick.run.loop import EpochEnded, EpochLoop
from tallystick.run.query import Query
from tallystick.run.triggers import Trigger
from tallystick.savepoint_files import refuse_savepoint
from tallystick.source.offsets import SourceOffsets, from_json
from tallystick.spark.executions import QueryRun
from tallystick.spark.group_offsets import GroupOffsets, SourceClient
from tallystick.spark.planning import StreamPlanner
from tallystick.spark.running import PipelineRun, check_checkpoint
from tallystick.spark.write_epochs import stored_lineage
from tallystick.spark_log import METADATA
from tallystick.storage import FileStorage


@dataclass(frozen=True, slots=True)
class LoopEpoch:
    """What an epoch reads; see `running.EpochInput`."""

    sources: tuple[str, ...]
    previous_sources: tuple[str, ...]
    timestamp_ms: int


class PlannedByUs:
    """Plans the epochs of a pipeline, and makes what runs them; see `ports.EpochSource`.

    Args:
        run: the pipeline.
        planner: asks Kafka.
        offset_count_max: the most that an epoch may span; None: no limit.
    """

    def __init__(
        self, run: PipelineRun, planner: StreamPlanner, offset_count_max: int | None
    ) -> None:
        self._run = run
        self._planner = planner
        self._offset_count_max = offset_count_max
        self._planned_at_ms = 0
        self._ran = LoopEpoch((), (), 0)
        self._checkpoint_id = -1

    def stop_at_what_is_there(self) -> None:
        """See `run.loop.LoopSource.stop_at_what_is_there`."""
        self._planner.stop_at_what_is_there()

    def plan(self, checkpoint_id: int, start: tuple[str, ...]) -> PlannedEpoch:
        """See `ports.EpochSource.plan`."""
        if self._run.spark.sparkContext._jsc is None:
            raise TallystickError(f"pipeline {self._run.name!r}: its SparkContext was stopped")
        self._planned_at_ms = time.time_ns() // 1_000_000
        position = _offsets(start[0]) if start else self._planner.first()
        stop = self._planner.next(position, self._offset_count_max)
        begins = start or (_text(position),)
        return PlannedEpoch(begins, None if stop is position else (_text(stop),))

    def engine(
        self, checkpoint_id: int, start: tuple[str, ...], sources: tuple[str, ...]
    ) -> Engine:
        """See `ports.EpochSource.engine`."""
        # The very first positions go with the epoch's own end, which has the starts as resolved.
        previous = () if not start or _offsets(start[0]).initial else start
        self._ran = LoopEpoch(sources, previous, self._planned_at_ms or time.time_ns() // 1_000_000)
        self._checkpoint_id = checkpoint_id
        return self._run.make_engine(self._ran)

    @property
    def shown(self) -> SourceOffsets:
        """Where the newest epoch has ended."""
        return _offsets(self._ran.sources[0])

    def describe(self) -> dict[str, Any]:
        """What the newest epoch read, for the progress."""
        latest = self._planner.latest()
        return {
            "batchId": self._checkpoint_id,
            "sources": [
                {
                    "description": "tallystick",
                    "startOffset": (self._ran.previous_sources or (None,))[0],
                    "endOffset": self._ran.sources[0],
                    "latestOffset": None if latest is None else _text(latest),
                }
            ],
        }


def start_loop(
    run: PipelineRun,
    checkpoint: str,
    trigger: Mapping[str, Any] | None,
    accepted: frozenset[str],
    *,
    is_resident: bool = False,
) -> Query:
    """Check, then start the loop that runs the pipeline's epochs."""
    storage, when = FileStorage(checkpoint), Trigger.of(trigger)
    refuse_savepoint(storage)
    check_checkpoint(storage, run.name)
    run.keyed.check(())  # by what is committed the driver checks it
    is_new = not storage.names(m.FOLDER)
    if is_new and storage.names("offsets"):
        raise begins_nowhere(Identity(run.name, "", storage.location))
    run.check(when.interval_ms or None, is_new=is_new)
    planner_broker = KafkaBroker(run.source_config)
    run_id = str(uuid.uuid4())
    try:
        lineage = lineage_of(storage)
        identity = Identity(run.name, lineage, storage.location, accepted)
        spark = run.spark
        driver = run.make_driver(
            QueryRun(spark, lineage, run.name, checkpoint, when.interval_ms or None),
            identity,
            storage,
        )
        if is_resident:
            run.stay_resident()
        options = parse_source_options(run.source_options, streaming=True)
        source = PlannedByUs(run, StreamPlanner(planner_broker, options), options.offset_count_max)
    except BaseException:
        planner_broker.close()
        run.close()
        raise
    groups = GroupOffsets(run.name, [SourceClient(options.shown_group, run.source_config)])
    context = spark.sparkContext

    def prepare() -> None:
        context.setJobGroup(run_id, f"pipeline {run.name}", interruptOnCancel=True)

    def cancel() -> None:
        run.cancel()
        _cancel_jobs(context, run_id)

    def show(_: EpochEnded) -> None:
        if source.shown.cluster_id != driver.cluster_id:
            groups.show([source.shown])

    def close() -> None:
        groups.close()
        planner_broker.close()
        run.close()

    def loop(note: Any) -> EpochLoop:
        def on_end(ended: EpochEnded) -> None:
            show(ended)
            note(ended)

        return EpochLoop(driver, source, when, on_end)

    query = Query(
        run.name,
        lineage,
        run_id,
        loop=loop,
        prepare=prepare,
        cancel=cancel,
        close=close,
        describe=source.describe,
    )
    query.begin()
    return query


def _cancel_jobs(context: SparkContext, run_id: str) -> None:
    try:
        context.cancelJobGroup(run_id)
    except Exception:
        if context._jsc is not None:  # else it is stopped, and so are its jobs
            raise


def lineage_of(storage: FileStorage) -> str:
    """The id of a checkpoint, which its first run gives it, where Spark would keep a query's.

    Raises:
        DataLossError: it is damaged.
    """
    if storage.get(METADATA) is None:
        # If another run was quicker, its id counts.
        storage.put_new(METADATA, json.dumps({"id": str(uuid.uuid4())}).encode())
    return stored_lineage(storage)


def _offsets(text: str) -> SourceOffsets:
    return from_json(json.loads(text))


def _text(offsets: SourceOffsets) -> str:
    return json.dumps(offsets.to_json(), separators=(",", ":"))
