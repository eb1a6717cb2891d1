"""A pipeline on the checkpoint of a fork: renamed, and led to the fork's own topics."""

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from tallystick.api.kafka_sink import KafkaSink
from tallystick.api.kafka_source import KafkaSource
from tallystick.api.streams import BroadcastTable, Stream
from tallystick.checkpoint.forks import Fork, fork_of
from tallystick.epoch.two_phase import Sink
from tallystick.errors import OptionError
from tallystick.storage.file_storage import FileStorage
from tallystick.tasks.steps import MapBatches, Step
from tallystick.values import TopicPartition

if TYPE_CHECKING:
    from tallystick.api.pipeline import Pipeline

AnyStep = TypeVar("AnyStep", bound=Step)


def as_forked(pipeline: "Pipeline", checkpoint: str) -> "Pipeline":
    """Return the pipeline as it runs on a checkpoint: of a fork, with other topics and name.

    Args:
        pipeline: the pipeline as the program has it.
        checkpoint: the location; it may be new.

    Raises:
        OptionError: the checkpoint is a fork's, and the pipeline would write elsewhere than to the
            fork's topics, or read one of them.
        ManifestError: the note of the fork is damaged.
    """
    fork = fork_of(FileStorage(checkpoint))
    if fork is None:
        return pipeline
    inputs = pipeline.inputs
    streams = tuple((name, _stream_beside(stream)) for name, stream in inputs.streams)
    forked = replace(
        pipeline,
        name=fork.name,
        inputs=replace(inputs, streams=streams),
        steps=tuple(map(_beside, pipeline.steps)),
        sinks=tuple(_led(sink, fork, checkpoint) for sink in pipeline.sinks),
    )
    _refuse_own_input(forked, fork, checkpoint)
    return forked


def _led(sink: Sink, fork: Fork, checkpoint: str) -> Sink:
    """Return a sink that writes to the topics of the fork."""
    where = f"checkpoint {checkpoint} is a fork of {fork.original}, which writes to its topics only"
    if not isinstance(sink, KafkaSink):
        raise OptionError(
            f"{where}: {type(sink).__name__} would write where the original does. Take it out of "
            f"the program that is tried, or start that on a checkpoint of its own"
        )
    if sink.topic is None:
        raise OptionError(
            f"{where}: a KafkaSink without topic= writes to topics that its rows name, and no map "
            f"holds for those. Set topic=, or start the program on a checkpoint of its own"
        )
    for argument in ("topic", "dead_letter_topic"):
        topic = getattr(sink, argument)
        if topic is not None and topic not in fork.topics:
            raise OptionError(
                f"{where}: KafkaSink({argument}={topic!r}) is not among those that it replaces, "
                f"{', '.join(fork.topics)}. Fork once more, with --topics …,{topic}=NEW"
            )
    letters, token = sink.dead_letter_topic, sink.token_topic
    return replace(
        sink,
        topic=fork.topics[sink.topic],
        dead_letter_topic=None if letters is None else fork.topics[letters],
        token_topic=None if token is None else fork.topics.get(token, token),
    )


def _beside(step: AnyStep) -> AnyStep:
    """Return a step whose table is read in a group of the fork's own."""
    if isinstance(step, MapBatches) and isinstance(step.state, BroadcastTable):
        return replace(step, state=replace(step.state, stream=_stream_beside(step.state.stream)))
    return step


def _stream_beside(stream: Stream) -> Stream:
    """Return a stream whose positions are shown in a group of the fork's own."""
    source = stream.source
    if isinstance(source, KafkaSource) and source.group_id:
        source = replace(source, group_id=None)  # that of the pipeline's name, which is another
    return replace(stream, source=source, steps=tuple(map(_beside, stream.steps)))


def _refuse_own_input(forked: "Pipeline", fork: Fork, checkpoint: str) -> None:
    """Raise OptionError if a topic of the fork is read, by the fork and so by the original."""
    for source in _sources(forked):
        reads = source.read_options(forked.name).subscription
        for topic in fork.topics.values():
            if topic in (reads.named or ()) or reads.covers(TopicPartition(topic, 0)):
                raise OptionError(
                    f"checkpoint {checkpoint} is a fork of {fork.original}, and would write to "
                    f"{topic!r}, which the program reads. Fork once more, to another topic"
                )


def _sources(pipeline: "Pipeline") -> Iterable[KafkaSource]:
    streams = [stream for _, stream in pipeline.inputs.streams]
    steps = (*pipeline.inputs.steps, *pipeline.steps)
    tables = (step.state for step in steps if isinstance(step, MapBatches))
    streams += [table.stream for table in tables if isinstance(table, BroadcastTable)]
    return [stream.source for stream in streams if isinstance(stream.source, KafkaSource)]
