"""A description of a pipeline before its start; nothing is started, and Kafka is not asked."""

import re
from collections.abc import Iterable, Iterator

from tallystick.api.kafka_sink import KafkaSink
from tallystick.api.rows_source import RowsSource
from tallystick.api.streams import Source
from tallystick.codec.ddl import ddl_of
from tallystick.codec.formats import JsonSchema
from tallystick.epoch.manifest import Manifest
from tallystick.epoch.two_phase import Guarantee, Sink
from tallystick.errors import OptionError
from tallystick.expressions.binding import Projection
from tallystick.kafka.config import KafkaConfig
from tallystick.options.source import SourceOptions
from tallystick.pipeline.compiled import PipelineRun, newest_manifest
from tallystick.pipeline.input_planning import by_input, check_none_gone
from tallystick.pipeline.inputs import PipelineInput
from tallystick.pipeline.keyed import state_places
from tallystick.pipeline.topology import OutputTopology
from tallystick.spark.cluster import JOBS, is_local, members_max
from tallystick.state.functions.processing import PANES
from tallystick.state.meaning import shown
from tallystick.storage.file_storage import FileStorage
from tallystick.tasks.epoch_plan import PipelinePlan
from tallystick.tasks.handed_on import HandedOn, handed_on
from tallystick.tasks.keyed import KeyedStep
from tallystick.tasks.outputs import Filter, Selection
from tallystick.tasks.steps import MapBatches, Process, Step, Transform

_WIDTH = 16


def explained(
    run: PipelineRun,
    sources: tuple[Source, ...],
    steps: tuple[Step, ...],
    topology: OutputTopology,
    checkpoint: str | None,
) -> str:
    """Return the description of a pipeline, a fact per line.

    Args:
        run: the pipeline, with all types known; not started.
        sources: the sources, by input.
        steps: the steps as the user wrote them.
        topology: the sinks.
        checkpoint: the pipeline's folder; None: not given.

    Raises:
        DataLossError: the checkpoint belongs to another pipeline.
    """
    manifest = None if checkpoint is None else newest_manifest(FileStorage(checkpoint), run.name)
    lines = [
        ("pipeline", run.name),
        *_inputs(run, sources, manifest),
        *_steps(run, steps, manifest),
        *_sinks(topology),
    ]
    on_spark = [
        *_exchange(run, sources, steps, topology),
        ("checkpoint", _checkpoint(checkpoint, manifest)),
        ("execution", _execution(run)),
        ("slots", _slots(run)),
        *_timeouts(run, topology),
    ]
    here = [("execution", "in this process, without Spark: nothing is kept")]
    is_here = any(isinstance(source, RowsSource) for source in sources)
    lines += here if is_here else on_spark
    return "\n".join(f"{name:{_WIDTH}} {text}" for name, text in lines)


def _inputs(
    run: PipelineRun, sources: tuple[Source, ...], manifest: Manifest | None
) -> Iterator[tuple[str, str]]:
    is_one = len(sources) == 1 and not run.inputs[0].name
    for pipeline_input, source in zip(run.inputs, sources, strict=True):
        yield "source", f"{'' if is_one else f'{pipeline_input.text}: '}{_source(source)}"
        is_here = isinstance(source, RowsSource)
        yield "", f"columns {pipeline_input.ddl}" if is_here else _values(pipeline_input.options)
        if pipeline_input.name and pipeline_input.uid != pipeline_input.name:
            yield "", f"its positions are those of uid {pipeline_input.uid!r}"
        for step in pipeline_input.steps:
            yield "", f"map_batches {_name(step.function)}"
    for table in run.tables:
        table_step = table.step
        yield f"table {table.uid}", f"each task has it, and reads {_topics_of(table.input)} for it"
        yield "", f"by {', '.join(table_step.codec.key.names)}: {ddl_of(table_step.codec.columns)}"
        if table_step.deleted is not None:
            yield "", f"rows are deleted where {_name(table_step.deleted)}"
        yield "", f"state lies in {state_places(run.cluster, table.uid)[0]} of the checkpoint"
    for state in run.keyed.lists:
        columns = ddl_of(state.codec.columns)
        yield f"list {state.uid}", f"each task that reads has one: {columns}"
        if state.union is not None:
            yield "", f"other tasks keep of all elements those of {_name(state.union)}"
        yield "", f"state lies in {state_places(run.cluster, state.uid)[0]} of the checkpoint"
    if run.inputs[0].name:
        yield (
            "inputs",
            f"{', '.join(source.name for source in run.inputs)} go to step 1 side by side",
        )
    positions = by_input(() if manifest is None else manifest.sources, run.previous_inputs)
    try:
        check_none_gone(positions, [source.uid for source in run.all_inputs])
    except OptionError as error:
        yield "", f"does not fit: {error}"
    for pipeline_input in run.all_inputs:
        if positions and pipeline_input.uid not in positions:
            yield "", f"{pipeline_input.text} is new: it begins as its source says"


def _topics_of(pipeline_input: PipelineInput) -> str:
    """Return the topics and the cluster of an input, as text."""
    names = pipeline_input.options.subscription.named
    what = "topics by a pattern" if names is None else f"topic {', '.join(sorted(names))}"
    return f"{what} at {pipeline_input.config.bootstrap_servers}"


def _source(source: Source) -> str:
    if isinstance(source, RowsSource):
        return "rows of this process"
    if isinstance(source.topics, re.Pattern):
        what = f"topics like {source.topics.pattern!r}"
    elif source.topics is not None:
        what = f"topic{'s' if len(source.topics) > 1 else ''} {', '.join(source.topics)}"
    else:
        what = f"partitions {dict(source.assignment or {})}"
    return f"{what} at {source.bootstrap_servers}"


def _values(options: SourceOptions) -> str:
    group = f"group {options.shown_group}" if options.shown_group else "no group"
    if options.value is None:
        return f"values stay binary; {group} shows how far it is read"
    kind = type(options.value).__name__
    fallback = "as the registry says" if isinstance(options.value, JsonSchema) else "string"
    return (
        f"values are parsed: {kind}, mode {options.value_mode}, {options.value_schema or fallback}"
        f"; {group} shows how far it is read"
    )


def _steps(
    run: PipelineRun, steps: tuple[Step, ...], manifest: Manifest | None
) -> Iterator[tuple[str, str]]:
    keyed = iter(run.keyed.steps)
    state = () if manifest is None else manifest.state
    try:
        bases = run.keyed.check(state)
    except OptionError as error:  # the newest epoch may be one that never was committed
        yield "state", f"does not fit: {error}"
        state, bases = (), run.keyed.check(())
    kept = {step_state.uid for step_state in run.keyed.taken_up(state)}
    starts = {step_state.uid: step_state for step_state in bases}
    for text in run.keyed.state_changes(state):
        yield "state", text
    for number, step in enumerate(steps, start=1):
        name = f"step {number}"
        if not isinstance(step, Process):
            yield name, _function(step)
            if isinstance(step, MapBatches):
                yield from _outputs(run, step.outputs)
            continue
        keyed_step = next(keyed)
        start = starts[keyed_step.uid]
        has_state = keyed_step.uid in kept
        keys = ", ".join(keyed_step.key.names)
        if step.inputs:
            pairs = zip(run.inputs, step.inputs, strict=True)
            keys = "; ".join(f"{source.name}: {', '.join(key)}" for source, (key, _) in pairs)
        yield name, f"process, uid {keyed_step.uid}, key_by {keys}"
        yield "", f"state: {_state(keyed_step)}{'' if has_state or manifest is None else ' (new)'}"
        yield from _watermark(run.keyed, keyed_step)
        yield "", f"puts out: {ddl_of(keyed_step.output)}"
        yield from _outputs(run, keyed_step.outputs)
        groups = f"{start.max_parallelism} key groups"
        if not run.cluster.is_there and keyed_step.parallelism is None:
            least = "" if has_state or keyed_step.max_parallelism else "at least "
            tasks = "as many tasks as run at a time"
            yield "", f"parallelism: {tasks}; {least}{groups}"
        else:
            tasks = f"{start.parallelism} tasks"
            why = "as many as run at a time" if keyed_step.parallelism is None else "parallelism="
            yield "", f"parallelism: {tasks} ({why}); {groups}"
        yield (
            "",
            f"exchange: rows come by key ({', '.join(keyed_step.key.names)}) to {tasks}, "
            f"{_over(run)}",
        )
        stored, copied = state_places(run.cluster, keyed_step.uid)
        yield "", f"state lies in {stored} of the checkpoint; copies on each host in {copied}"
        if meant := shown(declared.meaning for declared in keyed_step.declared):
            yield "", f"computes: {meant}"


def _watermark(keyed: PipelinePlan, step: KeyedStep) -> Iterator[tuple[str, str]]:
    """Report the origin of a step's watermark, and which rows may be late by it."""
    given = handed_on(keyed.steps)[keyed.steps.index(step)]
    if step.event_time is None:
        return
    if given is not None:
        giver = keyed.steps[given.giver].uid
        yield "", f"watermark: that of step {giver}, handed on; {_behind(step, given, giver)}"
    elif keyed.event_time is None:
        yield (
            "",
            (
                f"watermark: the latest {step.event_time} of its rows, from any partition: rows of "
                f"one that lags by more than the delay are late"
            ),
        )
    elif step is not keyed.steps[0]:
        yield (
            "",
            (
                f"watermark: by partition, of {step.event_time} as it is before step "
                f"{keyed.steps[0].uid}, which must not make it earlier"
            ),
        )


def _behind(step: KeyedStep, given: HandedOn, giver: str) -> str:
    """Report how far a step's event times may be behind the watermark handed on to it."""
    if given.is_known:
        return f"{step.event_time} is up to {given.lag_ms} ms behind it, so no row is late"
    return (
        f"{step.event_time} is made by a function of yours after step {giver}, and taken to be up "
        f"to {given.lag_ms} ms behind it: where it may be earlier, watermark_delay= has to say by "
        f"how much, or such rows are late"
    )


def _function(step: MapBatches | Transform) -> str:
    """Return a step without state as it was written: expressions need no name of a function."""
    if isinstance(step.function, Projection | Filter):
        return _name(step.function)
    word = "map_batches" if isinstance(step, MapBatches) else "transform"
    return f"{word} {_name(step.function)}"


def _name(function: object) -> str:
    return str(getattr(function, "__name__", repr(function)))


def _outputs(run: PipelineRun, names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Report the side outputs of a step."""
    for name in names:
        yield "", f"output {name}: {ddl_of(run.outputs[name])}"


def _state(step: KeyedStep) -> str:
    fields = [
        f"{state.name} {state.kind} {f'of {state.key_schema} ' if state.kind == PANES else ''}"
        f"{state.value_schema}"
        f"{f' (kept for {state.ttl_ms} ms)' if state.ttl_ms else ''}"
        for state in step.declared
    ]
    time = f"time mode {step.processor.time_mode}"
    if step.event_time is not None:
        late = f"{step.watermark_delay_ms} ms late at most"
        if step.watermark_column is not None:
            late = f"watermarks in {step.watermark_column}"
        time += f" by {step.event_time}, {late}"
    if step.idle_after_ms:
        time += f"; partitions that are read to their ends are idle after {step.idle_after_ms} ms"
    if step.idle_advance:
        time += "; where all are idle, the watermark goes on with the clock"
    if step.event_time_max_ahead_ms is not None:
        time += (
            f"; rows more than {step.event_time_max_ahead_ms} ms ahead of the clock are left out"
        )
    if step.max_drift_ms:
        time += (
            f"; partitions wait that are ahead of the slowest by more than {step.max_drift_ms} ms"
        )
    return f"{', '.join(fields) or 'none'}; {time}"


def _sinks(topology: OutputTopology) -> Iterator[tuple[str, str]]:
    for uid, sink in topology.by_uid:
        if uid == topology.uid:
            how = "one transaction per epoch"
        elif (uid, sink) in topology.deciding:
            how = f"in the transaction of {topology.uid}"
        else:
            how = "a transaction per task, committed when all is decided"
        yield f"sink {uid}", f"{_rows(topology.selection(uid))}{_sink(sink)}: {how}"
    for name in topology.dropped:
        yield "dropped", f"output {name}: no sink gets it, as write({name}=[]) says"
    decider = "the checkpoint's own log of decisions"
    if topology.sink is not None:
        decider = f"the transaction of {topology.uid}"
    yield "decision", f"{decider} says whether an epoch counts, for all sinks"


def _rows(selection: Selection) -> str:
    """Return the selection of a sink as text; empty: all rows of the main output."""
    output = f"output {selection.output}" if selection.output else ""
    if selection.when is not None:
        output = f"{output or 'main output'} when {_name(selection.when)}"
    if selection.functions:
        through = ", ".join(map(_name, selection.functions))
        output = f"{output or 'main output'} through {through}"
    return f"{output}, to " if output else ""


def _sink(sink: Sink) -> str:
    if not isinstance(sink, KafkaSink):
        return repr(sink)
    topic = "the topics that rows name" if sink.topic is None else f"topic {sink.topic}"
    letters = f", dead letters to {sink.dead_letter_topic}" if sink.dead_letter_topic else ""
    return (
        f"{topic} at {sink.bootstrap_servers}{letters}, guarantee {sink.guarantee}, "
        f"transactions={sink.transactions!r}, timeout {sink.transaction_timeout_ms} ms"
    )


def _exchange(
    run: PipelineRun,
    sources: tuple[Source, ...],
    steps: tuple[Step, ...],
    topology: OutputTopology,
) -> Iterator[tuple[str, str]]:
    """Report which rows leave their task on the way to the sinks."""
    if topology.others:
        uids = ", ".join(uid for uid, _ in topology.others)
        yield "exchange", f"to {uids}: none, each task writes the rows that it has"
    name = "" if topology.others else "exchange"
    for (uid, _), (output, _) in zip(topology.deciding, topology.written, strict=True):
        to = "topics that rows name" if output.topic is None else output.topic
        text = f"to {uid}: rows go to the task that writes their partition of {to}"
        if len(sources) == 1 and _readers_write(sources[0], steps):
            text += (
                "; co-partitioned ones, to a partition of the number they came from, stay in place"
            )
        yield name, f"{text}, {_over(run)}"
        name = ""


def _over(run: PipelineRun) -> str:
    return f"over {'the shuffle of Spark' if run.execution.kind == JOBS else 'own connections'}"


def _readers_write(source: Source, steps: tuple[Step, ...]) -> bool:
    """True if no step moves rows, and all come from one topic, as `SplitsEngine` sees it."""
    if isinstance(source, RowsSource):
        return False
    topics = source.assignment or source.topics
    is_one = topics is not None and not isinstance(topics, re.Pattern) and len(topics) == 1
    return is_one and all(isinstance(step, MapBatches) for step in steps)


def _timeouts(run: PipelineRun, topology: OutputTopology) -> Iterator[tuple[str, str]]:
    for number, source in enumerate(run.all_inputs):
        whose = "source" if len(run.all_inputs) == 1 else source.text
        yield "" if number else "timeouts", f"{whose}: {_calls(source.config)}"
    for uid, sink in topology.by_uid:
        if not isinstance(sink, KafkaSink):
            yield "", f"sink {uid}: those of its own system"
            continue
        output = sink.output
        text = f"sink {uid}: {_calls(output.config)}"
        if sink.guarantee == Guarantee.EXACTLY_ONCE.value:
            text += f"; a transaction {output.transaction_timeout_ms} ms"
            text += f", warned about from {int(output.timeout.warn_share * 100)} % of it on"
            if (uid, sink) not in topology.deciding:
                least = output.max_recovery_ms
                text += "; recovery " + (f"within {least} ms" if least else "not checked")
            else:
                text += "; recovery at any time, an epoch that timed out runs again"
        yield "", text


def _calls(config: KafkaConfig) -> str:
    return (
        f"a request {config.request_timeout_ms} ms, a call with all its tries "
        f"{config.delivery_timeout_ms} ms"
    )


def _checkpoint(checkpoint: str | None, manifest: Manifest | None) -> str:
    if checkpoint is None:
        return "as given to start(); explain(checkpoint=…) describes it"
    location = FileStorage(checkpoint).location
    if manifest is None:
        return f"{location}: new"
    uids = ", ".join(step.uid for step in manifest.state) or "no step"
    return (
        f"{location}: up to epoch {manifest.checkpoint_id}; whether that one is committed, Kafka "
        f"is asked at the start. State of {uids}"
    )


def _execution(run: PipelineRun) -> str:
    kind, reason = run.execution
    if kind == JOBS:
        return f"jobs, each epoch is a Spark job: {reason}"
    unless = "" if run.cluster.is_there else ", unless Spark's settings are in the way"
    return f"resident, tasks stay in the same processes{unless}"


def _slots(run: PipelineRun) -> str:
    if not run.cluster.is_there:
        return "not known without Spark: explain(spark) says it"
    there = run.cluster.parallelism
    if run.execution.kind == JOBS:
        return f"{there} there; taken by each epoch's job, and free between epochs"
    if is_local(run.cluster.context):
        return f"{there} there; 1 needed, whose task forks the others"
    needed = min(run.keyed.task_count, members_max(there))
    return f"{there} there; {needed} needed as long as the pipeline runs"
