"""The job of a run on the page: the graph with its rates, and the tasks of the newest epoch."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tallystick.host.stopwatch import TaskTimes
from tallystick.ops.ui.facts import NodeFact, PartitionFact, TaskFact
from tallystick.values import SINK, SOURCE, GraphNode, JobGraph

Watermarks = Mapping[str, int | None]
"""The watermark of each keyed step, by its uid."""


def unmeasured(
    graph: JobGraph, partitions: Sequence[PartitionFact], watermarks: Watermarks
) -> tuple[tuple[NodeFact, ...], ...]:
    """Return the graph of a job without rates.

    Args:
        graph: as the job was compiled.
        partitions: of all sources.
        watermarks: of the keyed steps.
    """
    are_many = len(graph[0]) > 1 if graph else False
    return tuple(
        tuple(
            NodeFact(
                node.kind,
                node.name,
                node.texts,
                watermark_ms=watermarks.get(node.name),
                lag=_lag(node, partitions, are_many=are_many) if node.kind == SOURCE else None,
            )
            for node in layer
        )
        for layer in graph
    )


def measured(
    graph: Iterable[Iterable[NodeFact]],
    recent: Sequence[Mapping[str, Any]],
    recent_s: float,
    put_out: Mapping[str, int],
) -> tuple[tuple[NodeFact, ...], ...]:
    """Return the graph of a job with rates.

    Args:
        graph: without them.
        recent: the progress of the epochs that count for the rates.
        recent_s: the seconds in which these were decided.
        put_out: rows of these epochs by topic, or by the uid of a sink.
    """
    return tuple(
        tuple(
            node
            if node.kind == SOURCE
            else _sink(node, recent_s, put_out)
            if node.kind == SINK
            else _step(node, recent, recent_s)
            for node in layer
        )
        for layer in graph
    )


def _lag(node: GraphNode, partitions: Iterable[PartitionFact], *, are_many: bool) -> int | None:
    lags = [
        partition.lag
        for partition in partitions
        if not are_many or partition.topic.startswith(f"{node.name}/")
    ]
    known = [lag for lag in lags if lag is not None]
    return sum(known) if known and len(known) == len(lags) else None


def _sink(node: NodeFact, recent_s: float, put_out: Mapping[str, int]) -> NodeFact:
    rows = sum(put_out.get(place, 0) for place in {node.name, *node.texts})
    return replace(node, in_per_s=rows / recent_s)


def _step(node: NodeFact, recent: Sequence[Mapping[str, Any]], recent_s: float) -> NodeFact:
    entries = [
        entry for progress in recent for entry in progress["tasks"] if entry["step"] == node.name
    ]
    sums = Counter[str]()
    for entry in entries:
        sums.update({key: entry[key] for key in ("busyMs", "waitMs", "rowsIn", "rowsOut")})
    tasks = entries[-1]["tasks"] if entries else None
    task_ms = 1000 * recent_s * (tasks or 1)
    busy = min(1.0, sums["busyMs"] / task_ms)
    return replace(
        node,
        tasks=tasks,
        in_per_s=sums["rowsIn"] / recent_s,
        out_per_s=sums["rowsOut"] / recent_s,
        busy=busy,
        waiting=min(1.0 - busy, sums["waitMs"] / task_ms),
    )


def tasks_of(
    graph: JobGraph, tasks: Iterable[TaskTimes], watermarks: Watermarks
) -> tuple[TaskFact, ...]:
    """Return the tasks of an epoch, in the order of the graph.

    Args:
        graph: of the job; its layers between sources and sinks are the stages of tasks.
        tasks: as they reported.
        watermarks: of the keyed steps.
    """
    steps = [node.name for layer in graph for node in layer if node.kind not in (SOURCE, SINK)]
    facts = []
    for stage, step in enumerate(steps):
        own = sorted((task for task in tasks if task.stage == stage), key=lambda task: task.task)
        facts += [
            TaskFact(
                step=step,
                number=number,
                host=task.host,
                rows_in=task.rows_in,
                rows_out=task.rows_out,
                busy_ms=round(task.busy_ms, 1),
                wait_ms=round(task.wait_ms, 1),
                watermark_ms=watermarks.get(step),
            )
            for number, task in enumerate(own)
        ]
    return tuple(facts)
