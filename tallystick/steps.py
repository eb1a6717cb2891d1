"""The steps between reading and writing, and where each of them runs.

    read ─► before: Arrow, in the reader ─► frames: DataFrame code ─► after: Arrow, in the encoder

Without DataFrame code all functions run in the reader, and no row crosses to the JVM.
"""

from collections.abc import Callable
from dataclasses import dataclass

from pyspark.sql import DataFrame

from tallystick.errors import OptionError
from tallystick.task import BatchFunction

FrameFunction = Callable[[DataFrame], DataFrame]


@dataclass(frozen=True)
class MapBatches:
    """Arrow in, Arrow out; `schema` is what comes out, where Spark has to know it."""

    function: BatchFunction
    schema: str | None = None


@dataclass(frozen=True)
class Transform:
    """A DataFrame in, a DataFrame out."""

    function: FrameFunction


Step = MapBatches | Transform


@dataclass(frozen=True)
class FrameStage:
    """The DataFrame part of a pipeline, and the columns that it starts from, as DDL."""

    functions: tuple[FrameFunction, ...]
    ddl: str


@dataclass(frozen=True)
class Stages:
    """The steps by the place where they run."""

    before: tuple[BatchFunction, ...]
    frames: FrameStage | None
    after: tuple[BatchFunction, ...]


def arrange(steps: tuple[Step, ...], source_ddl: str) -> Stages:
    """Say where each step runs.

    Raises:
        OptionError: Spark would not know the columns of a step, or Arrow functions stand between
            DataFrame ones.
    """
    frame_positions = [i for i, step in enumerate(steps) if isinstance(step, Transform)]
    if not frame_positions:
        return Stages(_functions(steps), None, ())
    first, last = frame_positions[0], frame_positions[-1]
    frames = [step for step in steps[first : last + 1] if isinstance(step, Transform)]
    if len(frames) != last + 1 - first:
        raise OptionError(
            "map_batches stands between two transform steps: put the DataFrame steps side by side, "
            "or use DataFrame.mapInArrow inside one of them"
        )
    before = steps[:first]
    ddl = before[-1].schema if before and isinstance(before[-1], MapBatches) else source_ddl
    if ddl is None:
        raise OptionError(
            "the map_batches before transform needs schema=, e.g. schema='dest string, n bigint': "
            "Spark has to know the columns of the DataFrame"
        )
    stage = FrameStage(tuple(step.function for step in frames), ddl)
    return Stages(_functions(before), stage, _functions(steps[last + 1 :]))


def _functions(steps: tuple[Step, ...]) -> tuple[BatchFunction, ...]:
    return tuple(step.function for step in steps if isinstance(step, MapBatches))
