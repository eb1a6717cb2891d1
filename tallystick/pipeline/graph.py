"""The graph of a job: sources, functions, keyed steps and sinks, in the order of the rows."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from tallystick.epoch.two_phase import Sink
from tallystick.pipeline.topology import OutputTopology
from tallystick.state.meaning import shown
from tallystick.tasks.hints import name_of
from tallystick.tasks.keyed import KeyedStep
from tallystick.tasks.read import BatchFunction
from tallystick.values import SINK, SOURCE, TASKS, GraphNode, JobGraph

if TYPE_CHECKING:
    from tallystick.pipeline.inputs import PipelineInput

READ, WRITE = "read", "write"


def graph_of(
    inputs: "Sequence[PipelineInput]", steps: Sequence[KeyedStep], topology: OutputTopology
) -> JobGraph:
    """Return the graph of a pipeline.

    Args:
        inputs: those of broadcast tables too.
        steps: the keyed steps.
        topology: the sinks.
    """
    many = len(inputs) > 1
    functions = [
        f"{source.name or source.uid}: {name}" if many else name
        for source in inputs
        for name in _names(source.read.functions)
    ]
    return (
        tuple(GraphNode(SOURCE, source.uid, _topics(source)) for source in inputs),
        (GraphNode(TASKS, READ, tuple(dict.fromkeys(functions))),),
        *((_keyed(step),) for step in steps),
        *([(GraphNode(TASKS, WRITE),)] if topology.decider is not None else []),
        tuple(GraphNode(SINK, uid, _place(sink)) for uid, sink in topology.by_uid),
    )


def _topics(source: "PipelineInput") -> tuple[str, ...]:
    named = source.options.subscription.named
    return ("topics by a pattern",) if named is None else tuple(sorted(named))


def _keyed(step: KeyedStep) -> GraphNode:
    key = f"by {', '.join(step.key.names)}"
    meant = shown(declared.meaning for declared in step.declared)
    computed = [meant] if meant else []
    return GraphNode(TASKS, step.uid, (key, *computed, *_names(step.functions)))


def _place(sink: Sink) -> tuple[str, ...]:
    topic = getattr(sink, "topic", None)
    return (topic if isinstance(topic, str) else type(sink).__name__,)


def _names(functions: Iterable[BatchFunction]) -> list[str]:
    """Return the names of the user's functions, without the functions of inputs between them."""
    return [
        name_of(function)
        for function in functions
        if type(function).__module__ != "tallystick.pipeline.inputs"
    ]
