"""The steps between reading and writing, and where each of them runs.

    read ─► before: Arrow, in the reader ─► frames: DataFrame code ─► after: Arrow, in the encoder

Without DataFrame code all functions run in the reader, and no row crosses to the JVM. With keyed
steps the rows go on from task to task, as Arrow too:

    … ─► keyed step ─► its functions ─► keyed step ─► its functions ─► encoder
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Protocol, TypeAlias

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from tallystick.codec import ddl
from tallystick.errors import OptionError
from tallystick.state.catalog import PLAIN_NAME
from tallystick.state.functions.processing import Processor
from tallystick.state.key_groups import MAX_PARALLELISM_MAX
from tallystick.tasks.hints import place_of, returns_nothing
from tallystick.tasks.keyed import KeyedSettings
from tallystick.tasks.outputs import Filter
from tallystick.tasks.read import BatchFunction

FrameFunction = Callable[[DataFrame], DataFrame]
ONLY_UID = "process-1"
"""The uid of a keyed step that is the only one and has no other uid."""
Columns: TypeAlias = Annotated[str | pa.Schema | StructType, ddl.no_dict]
"""Columns, as Spark's DDL text, its type, or an Arrow schema."""


class HasUid(Protocol):
    """Operator state as the user declared it."""

    @property
    def uid(self) -> str:
        """The name of it in the checkpoint."""
        ...


@dataclass(frozen=True)
class MapBatches:
    """Arrow in, Arrow out; `schema` is what comes out, where Spark or a keyed step must know it.

    `outputs` are the columns of what it puts out beside that, by name; `state` is the broadcast
    table that the function gets.
    """

    function: BatchFunction
    schema: Columns | None = None
    outputs: Mapping[str, Columns] = field(default_factory=dict)
    state: "HasUid | None" = None

    def __post_init__(self) -> None:
        check_function("map_batches", self.function, 1)


@dataclass(frozen=True)
class Transform:
    """A DataFrame in, a DataFrame out."""

    function: FrameFunction

    def __post_init__(self) -> None:
        check_function("transform", self.function, 1)
        if returns_nothing(self.function):
            raise OptionError(
                f"transform(function={place_of(self.function)}): it returns nothing: expected a "
                f"function that returns a DataFrame. Has it no return?"
            )


@dataclass(frozen=True)
class Process(KeyedSettings):
    """A keyed step: rows go to the tasks that own their keys, and a function with state there.

    Args:
        uid: names the step's state across changes of the pipeline; None: the only keyed step.
        key: the columns of the key.
        processor: the function.
        output: the columns of the output; None: as the processor says.
        inputs: the key and the event time of each named input; none where rows come in one stream.
    """

    uid: str | None
    key: tuple[str, ...]
    processor: Processor
    output: Columns | None
    inputs: tuple[tuple[tuple[str, ...], str | None], ...] = ()

    def __post_init__(self) -> None:
        if self.uid is not None and not PLAIN_NAME.fullmatch(self.uid):
            raise OptionError(
                f"uid={self.uid!r}: expected up to 100 letters, digits, '.', '_' and '-', the "
                f"first a letter or digit: it names files"
            )
        for name in ("max_parallelism", "parallelism"):
            number = getattr(self, name)
            if number is not None and not 1 <= number <= MAX_PARALLELISM_MAX:
                raise OptionError(f"{name}={number}: expected 1 to {MAX_PARALLELISM_MAX}, or None")
        if self.idle_advance and not self.idle_after_ms:
            raise OptionError(
                "idle_advance=True needs idle_after=: how long partitions without rows are waited "
                "for, before the watermark goes on with the clock"
            )
        if self.watermark_column is not None and (self.watermark_delay_ms or self.inputs):
            raise OptionError(
                f"watermark_column={self.watermark_column!r}: it says itself what may still come, "
                f"of all rows of one stream: leave watermark_delay= out, and do not name inputs"
            )
        most = self.max_parallelism or MAX_PARALLELISM_MAX
        if self.parallelism is not None and self.parallelism > most:
            raise OptionError(
                f"parallelism={self.parallelism}: there are {most} key groups (max_parallelism), "
                f"and a task without any would have nothing to do"
            )


Step = MapBatches | Transform | Process


def check_function(step: str, function: object, count: int, argument: str = "function") -> None:
    """Refuse a function that cannot be called with so many arguments, or returns no rows.

    Raises:
        OptionError: it is none, takes others, or is a generator or async.
    """
    if not callable(function):
        raise OptionError(
            f"{step}({function!r}): expected a function, by its name alone: {step}(clean), and not "
            f"{step}(clean()), which calls it here"
        )
    takes = "the rows" if count == 1 else "the rows and the state= that the step names"
    if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
        raise OptionError(
            f"{step}({argument}={place_of(function)}): it has yield or async in it: expected a "
            f"plain function, which returns its result"
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        if isinstance(function, partial):
            raise OptionError(
                f"{step}({argument}={place_of(function)}): {error}: does the function have the "
                f"arguments that partial() names?"
            ) from None
        return  # of a compiled library: nobody knows
    try:
        signature.bind(*[None] * count)
    except TypeError:
        raise OptionError(
            f"{step}({argument}={place_of(function)}): it takes the arguments {signature}, and is "
            f"called with {count}, {takes}"
        ) from None


@dataclass(frozen=True)
class FrameStage:
    """The DataFrame part of a pipeline, and the columns that it starts from, as DDL."""

    functions: tuple[FrameFunction, ...]
    ddl: str


@dataclass(frozen=True)
class KeyedStage:
    """A keyed step and the uid of its state.

    Args:
        step: as the user wrote it.
        uid: unique in the pipeline.
        columns: of the rows that come to the step; None: as the DataFrame, or the keyed step
            before, makes them.
        functions: the functions that the output passes through.
    """

    step: Process
    uid: str
    columns: Columns | None
    functions: tuple[BatchFunction, ...]


@dataclass(frozen=True)
class Stages:
    """The steps by the place where they run.

    `after` is what stands between DataFrame code and the first keyed step, or the encoder.
    """

    before: tuple[BatchFunction, ...]
    frames: FrameStage | None
    after: tuple[BatchFunction, ...]
    keyed: tuple[KeyedStage, ...] = ()


def arrange(steps: tuple[Step, ...], source: Columns) -> Stages:
    """Return where each step runs.

    Args:
        steps: in their order.
        source: the columns of the rows that were read; as DDL where DataFrame code may follow.

    Raises:
        OptionError: the columns of a step would not be known, Arrow functions stand between
            DataFrame ones, DataFrame code stands after a keyed step, or one of several of those
            has no uid of its own.
    """
    keyed_at = [i for i, step in enumerate(steps) if isinstance(step, Process)]
    first = keyed_at[0] if keyed_at else len(steps)
    if any(isinstance(step, Transform) for step in steps[first:]):
        raise OptionError(
            "transform stands after process: what keyed tasks leave (files of state, dead "
            "letters) travels to the writing tasks along with their rows, and DataFrame code would "
            "drop it. Put the DataFrame code before key_by, or into map_batches"
        )
    stages = _stateless(steps[:first], source)
    if not keyed_at:
        return stages
    known = None if stages.frames else source
    return Stages(stages.before, stages.frames, stages.after, _keyed(steps, keyed_at, known))


def refuse_outputs(steps: Iterable[Step]) -> None:
    """Raise OptionError if one of the steps before DataFrame code has side outputs."""
    for step in steps:
        if isinstance(step, MapBatches) and step.outputs:
            raise OptionError(
                f"the map_batches before transform has outputs ({', '.join(step.outputs)}): a "
                f"DataFrame has one kind of rows, and would drop these. Put the function after "
                f"transform"
            )


def _stateless(steps: tuple[Step, ...], source: Columns) -> Stages:
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
    refuse_outputs(before)
    maker = maker_of_columns(before)
    columns = maker.schema if isinstance(maker, MapBatches) else source
    if columns is None:
        raise OptionError(
            "the map_batches before transform needs schema=, e.g. schema='dest string, n bigint': "
            "Spark has to know the columns of the DataFrame"
        )
    stage = FrameStage(tuple(step.function for step in frames), ddl.text_of(columns))
    return Stages(_functions(before), stage, _functions(steps[last + 1 :]))


def maker_of_columns(steps: Sequence[Step]) -> Step | None:
    """Return the last step that may change the columns of rows; a filter keeps them."""
    for step in reversed(steps):
        if not (isinstance(step, MapBatches) and isinstance(step.function, Filter)):
            return step
    return None


def _keyed(
    steps: tuple[Step, ...], keyed_at: list[int], known: Columns | None
) -> tuple[KeyedStage, ...]:
    """Return the keyed steps; `known` are the columns of the first one's rows, if not None."""
    stages: list[KeyedStage] = []
    for number, at in enumerate(keyed_at, start=1):
        step, before = steps[at], maker_of_columns(steps[:at])
        assert isinstance(step, Process)
        columns = None if stages else known
        if isinstance(before, MapBatches):
            if before.schema is None:
                raise OptionError(
                    f"the map_batches before key_by({', '.join(map(repr, step.key))}) needs "
                    f"schema=, e.g. schema='dest string, n bigint': the types of the key's columns "
                    f"belong to the state, and have to be known before the first row"
                )
            columns = before.schema
        if step.uid is None and len(keyed_at) > 1:
            raise _unnamed(number, step)
        uid = step.uid or ONLY_UID
        if any(stage.uid == uid for stage in stages):
            raise OptionError(
                f"two process steps have uid {uid!r}, which names a step's state: give each its own"
            )
        after = steps[at + 1 : keyed_at[number] if number < len(keyed_at) else None]
        stages.append(KeyedStage(step, uid, columns, _functions(after)))
    return tuple(stages)


def _unnamed(number: int, step: Process) -> OptionError:
    """Return the error for a step without uid beside others: order alone would name states."""
    return OptionError(
        f"process step {number}, after key_by({', '.join(map(repr, step.key))}), has no uid, and "
        f"the pipeline has several such steps: which state is whose would hang on their order. "
        f"Give each uid='…', a name that it keeps. Where a checkpoint has state already, "
        f"`tallystick inspect` shows under which uid: that of a step which was the only one is "
        f"under uid={ONLY_UID!r}"
    )


def _functions(steps: tuple[Step, ...]) -> tuple[BatchFunction, ...]:
    return tuple(step.function for step in steps if isinstance(step, MapBatches))
