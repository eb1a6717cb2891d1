"""The keyed steps of a pipeline with all types known."""

import logging
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from tallystick.arguments import missing_column, not_one_of
from tallystick.checkpoint.folder import state_path
from tallystick.checkpoint.local.store import ROOT_VARIABLE, state_folder
from tallystick.codec.ddl import ddl_of
from tallystick.codec.layout import Layout
from tallystick.errors import NeedsSparkError, OptionError, RecordError
from tallystick.spark.cluster import Cluster
from tallystick.spark.engine import transformed
from tallystick.spark.gang.messages import dumps
from tallystick.state.functions.inputs import TIME
from tallystick.state.functions.join_columns import inputs_in
from tallystick.state.functions.processing import (
    EVENT_TIME,
    NO_TIME,
    PROCESSING_TIME,
    TIME_MODES,
    HasInitialState,
    HasOutputs,
    StateDeclaration,
)
from tallystick.state.functions.vectorised import ByColumns, VectorisedFunction
from tallystick.state.keys import KeyCodec
from tallystick.state.meaning import name_text
from tallystick.tasks.event_times import check_time_column
from tallystick.tasks.frames import conform
from tallystick.tasks.handed_on import first_timed, noted_column
from tallystick.tasks.hints import name_of
from tallystick.tasks.keyed import KeyedStep
from tallystick.tasks.steps import Columns, KeyedStage, MapBatches, Process, Stages, Step

logger = logging.getLogger(__name__)


def keyed_steps(cluster: Cluster, stages: Stages) -> tuple[KeyedStep, ...]:
    """Return the keyed steps of a pipeline, checked.

    Raises:
        OptionError: a key, a state, an output or a time cannot be as the step says.
    """
    steps: list[KeyedStep] = []
    for stage in stages.keyed:
        timing = {
            "idle_after": stage.step.idle_after_ms,
            "max_drift": stage.step.max_drift_ms,
            "watermark_column": stage.step.watermark_column,
        }
        for name in (parameter for parameter, given in timing.items() if given):
            if first_timed(steps) is not None:
                raise OptionError(
                    f"step {stage.uid}: {name}= is for the first step with event time, whose "
                    f"watermark follows from the partitions, and does nothing here: this one is "
                    f"handed its watermark by step {steps[-1].uid}. Leave it out, or give it to "
                    f"that step"
                )
            if stages.frames is not None:
                raise OptionError(
                    f"step {stage.uid}: {name}= does nothing behind a transform, where nobody "
                    f"knows which partition a row is from: leave it out. The watermark there is "
                    f"the latest event time less watermark_delay"
                )
        if stage.columns is not None:
            with _named(stage.uid):
                columns = columns_of(cluster, stage.columns, "the columns that come to it")
        else:
            columns = steps[-1].output if steps else columns_of(cluster, _of(cluster, stages))
        later = stages.keyed[len(steps) + 1 :]
        names_times = first_timed(steps) is None and any(other.step.event_time for other in later)
        steps.append(_step(cluster, stage, columns, names_times=names_times))
    _check_origin(steps, has_transform=stages.frames is not None)
    return tuple(steps)


def _check_origin(steps: Sequence[KeyedStep], *, has_transform: bool) -> None:
    """Refuse event times in a column that readers do not have, for lack of a watermark.

    Behind a transform, and behind functions that go by the clock, a watermark may follow from the
    rows themselves: how they are then is as far as all have come.

    Raises:
        OptionError: a later step is the first with event times, in a column made by steps before.
    """
    at = first_timed(steps)
    if not at or has_transform:
        return
    timed, first = steps[at], steps[0]
    if any(step.processor.time_mode == PROCESSING_TIME for step in steps[:at]):
        return
    if noted_column(first, timed) is None:
        raise OptionError(
            f"step {timed.uid}: event_time={timed.event_time!r} is a column that the steps before "
            f"it make, and none of them has event_time=: so nobody would know how far the "
            f"partitions are, and rows of those that lag would be late. Name the times where "
            f"rows begin: process(…, event_time=…) of step {first.uid}; it hands them on"
        )


def lean_layout(layout: Layout, names: Collection[str | None]) -> Layout:
    """Return a layout without the Kafka columns that are missing from `names`."""
    prefix = layout.prefix if layout.value is not None else ""
    metadata = tuple(
        name
        for name in layout.metadata
        if prefix + name in names or (name == "key" and layout.key is not None)
    )
    # A field of the value may have the name where there are no headers.
    headers = layout.headers and f"{prefix}headers" in names
    return replace(layout, metadata=metadata, headers=headers)


def _step(
    cluster: Cluster, stage: KeyedStage, columns: pa.Schema, *, names_times: bool
) -> KeyedStep:
    """Return a step; with `names_times` its event time may be there for later steps alone."""
    step, uid = stage.step, stage.uid
    missing = [name for name in step.key if name not in columns.names]
    if missing:
        what = f"step {uid}: key_by({missing[0]!r})"
        raise missing_column(what, missing[0], columns.names)
    unknown = sorted((step.processor.reads or frozenset()) - set(columns.names))
    if unknown:
        raise missing_column(f"step {uid}: its function", unknown[0], columns.names)
    _check_time(uid, step, columns, names_times=names_times)
    processor = step.processor
    with _named(uid):
        key = KeyCodec(pa.schema([columns.field(name) for name in step.key]))
        if isinstance(processor, ByColumns):
            processor = processor.make(columns)
        given, known = _given(cluster, step.output), processor.output(key.schema, columns)
        declared = _with_columns(processor.declared(key), step, columns)
        sides = processor.outputs(key.schema, columns) if isinstance(processor, HasOutputs) else {}
        outputs = {
            name: columns_of(cluster, side, f"output {name!r}") for name, side in sides.items()
        }
    return KeyedStep(
        uid=uid,
        key=key,
        columns=columns,
        processor=processor,
        declared=declared,
        output=output_of(uid, given, known),
        functions=stage.functions,
        outputs=outputs,
        input_times=_input_times(step, columns),
        **step.settings,
    )


def _input_times(step: Process, columns: pa.Schema) -> dict[str, str]:
    """Return the event-time column of each named input with event times."""
    if not step.inputs:
        return {}
    names = columns.names[columns.names.index(TIME) + 1 :]
    pairs = zip(names, step.inputs, strict=True)
    return {name: event_time for name, (_, event_time) in pairs if event_time is not None}


def _with_columns(
    declared: tuple[StateDeclaration, ...], step: Process, columns: pa.Schema
) -> tuple[StateDeclaration, ...]:
    """Return states with the columns of their keys and times as part of their meaning.

    Those of a single input's key are in the key's schema. It has the names of the first input's.
    """
    arguments: list[tuple[str, str]] = []
    names = map(name_text, inputs_in(columns, "key_by")) if step.inputs else ()
    pairs = list(zip(names, step.inputs, strict=True))
    arguments += [(f"key_by[{name}]", name_text(key)) for name, (key, _) in pairs]
    if step.processor.time_mode == EVENT_TIME:
        times = {f"event_time[{name}]": column for name, (_, column) in pairs}
        arguments += [
            (argument, "no column" if column is None else name_text(column))
            for argument, column in (times or {"event_time": step.event_time}).items()
        ]
    return tuple(replace(state, meaning=(*state.meaning, *arguments)) for state in declared)


def state_places(cluster: Cluster, uid: str) -> tuple[str, str]:
    """Return where a step's state lies, below the checkpoint, and the copies on workers' hosts.

    Args:
        cluster: whose workers they are.
        uid: the step's.
    """
    root = cluster.conf.get(f"spark.executorEnv.{ROOT_VARIABLE}")
    return state_path(uid), root or str(state_folder())


@contextmanager
def _named(uid: str) -> Iterator[None]:
    """Add the step's uid to errors, also to errors of the user's own `init`."""
    try:
        yield
    except NeedsSparkError:
        raise
    except OptionError as error:
        raise OptionError(f"step {uid}: {error}") from error
    except Exception as error:
        error.add_note(
            f"in step {uid}: init() of its function is run once at the start, on the driver, to "
            f"learn which states it declares"
        )
        raise


def check_sendable(steps: Iterable[Step]) -> None:
    """Refuse functions of the user's that cannot be sent to tasks.

    Raises:
        OptionError: a function cannot be pickled.
    """
    sent: object
    for number, step in enumerate(steps, start=1):
        match step:
            case MapBatches(function):
                what, sent = f"map_batches {name_of(function)}", function
            case Process(processor=processor):
                # What is put in once, an initial state, is data, and may be much.
                what = f"process after key_by({', '.join(map(repr, step.key))})"
                sent = processor.started() if isinstance(processor, HasInitialState) else processor
            case _:
                continue
        try:
            dumps(sent)
        except Exception as error:
            raise OptionError(
                f"step {number}, {what}: its function cannot be sent to the tasks that run it: "
                f"{error}. It must not use locks, clients, sessions and the like that were made "
                f"outside of it: make them inside; a StatefulProcessor makes them in init()"
            ) from error


def _check_time(uid: str, step: Process, columns: pa.Schema, *, names_times: bool) -> None:
    """Refuse time settings of a step that contradict each other or have no effect.

    With `names_times`, an event time has an effect if only later steps go by it.

    Raises:
        OptionError: a setting is refused.
    """
    mode = step.processor.time_mode
    if mode not in TIME_MODES:
        raise not_one_of(f"step {uid}: time_mode", mode, TIME_MODES)
    if step.event_time is None:
        if mode == EVENT_TIME:
            raise OptionError(
                f"step {uid}: time_mode 'EventTime' needs event_time=, the column that holds it; "
                f"it may need watermark_delay= too"
            )
        given = {
            "watermark_delay": step.watermark_delay_ms,
            "idle_after": step.idle_after_ms,
            "max_drift": step.max_drift_ms,
            "watermark_column": step.watermark_column,
            "event_time_max_ahead": step.event_time_max_ahead_ms,
        }
        for name in (parameter for parameter, value in given.items() if value not in (0, None)):
            raise OptionError(
                f"step {uid}: {name}= does nothing without event_time=, the column that it is "
                f"about: name it, or leave {name} out"
            )
        return
    check_time_column(uid, columns, step.event_time)
    if step.watermark_column is not None:
        check_time_column(uid, columns, step.watermark_column, "watermark_column")
    goes_by = step.processor.event_time if isinstance(step.processor, VectorisedFunction) else None
    if goes_by not in (None, step.event_time):
        raise OptionError(
            f"step {uid}: event_time={step.event_time!r}, but its function goes by {goes_by!r}: "
            f"one clock decides what is late and when a session ends. Name the same column"
        )
    if mode == NO_TIME and not names_times:
        raise OptionError(
            f"step {uid}: event_time={step.event_time!r} does nothing with time mode 'None', which "
            f"drops no late rows and has no timers, and no later step asks for times: set "
            f"time_mode='EventTime' (that of a function of columns in vectorised()), or leave "
            f"event_time out"
        )


def output_of(uid: str, given: pa.Schema | None, known: pa.Schema | None) -> pa.Schema:
    """Return the columns that a step puts out.

    Args:
        uid: of the step, for messages.
        given: as passed to `process`; types may be wider than the function's.
        known: as the function says.

    Raises:
        OptionError: nobody says, or they say different things.
    """
    if given is None:
        if known is None:
            raise OptionError(
                f"step {uid}: process() needs output=, e.g. output='user string, n bigint': what "
                f"a function of your own puts out is not known before it does"
            )
        return known
    if known is not None and not _holds(given, known):
        raise OptionError(
            f"step {uid}: output= says {ddl_of(given)!r}, and its function puts out "
            f"{ddl_of(known)!r}. Declare it so, or leave output= out; to put out other columns, "
            f"add a map_batches"
        )
    return given


def _holds(given: pa.Schema, known: pa.Schema) -> bool:
    """True if columns with all values of the known ones are given, in any order."""
    if sorted(given.names) != sorted(known.names):
        return False
    try:
        conform(pa.RecordBatch.from_pylist([], schema=known), given, "the output")
        both = pa.unify_schemas([given, known], promote_options="permissive")
    except (OptionError, RecordError, pa.ArrowInvalid, pa.ArrowTypeError):
        return False
    return bool(both.equals(given))


def output_after(cluster: Cluster, step: Process, columns: pa.Schema | None) -> pa.Schema | None:
    """Return the columns that a keyed step puts out, as far as they are known before it is checked.

    Args:
        cluster: whose Spark may have to read columns.
        step: the step.
        columns: of the rows that come to it; None: not known.
    """
    with suppress(OptionError, KeyError):  # `_step` says what is wrong
        if columns is not None and all(name in columns.names for name in step.key):
            key = KeyCodec(pa.schema([columns.field(name) for name in step.key]))
            processor = step.processor
            if isinstance(processor, ByColumns):
                processor = processor.make(columns)
            known = processor.output(key.schema, columns)
            return output_of(step.uid or "", _given(cluster, step.output), known)
        return _given(cluster, step.output)
    return None


def _given(cluster: Cluster, columns: Columns | None) -> pa.Schema | None:
    return None if columns is None else columns_of(cluster, columns, "output=")


def _of(cluster: Cluster, stages: Stages) -> pa.Schema:
    """Return the columns that DataFrame code makes, found by a run on no rows."""
    assert stages.frames is not None, "only DataFrame code leaves columns open"
    empty: DataFrame = cluster.session.createDataFrame([], stages.frames.ddl)
    frame = transformed(stages.frames.functions, empty)
    return to_arrow_schema(frame.schema, timezone="UTC")


def columns_of(cluster: Cluster, columns: Columns, what: str = "its columns") -> pa.Schema:
    """Return columns as an Arrow schema, all of them nullable.

    Raises:
        OptionError: the columns are not given as a schema.
    """
    if isinstance(columns, str):
        columns = cluster.columns(columns, what)
    if isinstance(columns, StructType):
        columns = to_arrow_schema(columns, timezone="UTC")
    if not isinstance(columns, pa.Schema):
        raise OptionError(
            f"{what}: {columns!r} is no schema: give a pyarrow.Schema, a StructType, or DDL like "
            f"'n bigint'"
        )
    return pa.schema([pa.field(column.name, column.type) for column in columns])
