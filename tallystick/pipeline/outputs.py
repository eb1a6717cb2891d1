"""The outputs that the steps of a pipeline declare, with all types known, against its sinks."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

import pyarrow as pa

from tallystick.errors import OptionError
from tallystick.pipeline.keyed import columns_of
from tallystick.pipeline.topology import OutputTopology
from tallystick.spark.cluster import Cluster
from tallystick.spark.gang.messages import dumps
from tallystick.tasks.keyed import KeyedStep
from tallystick.tasks.keyed_step import MapBatches, Step
from tallystick.tasks.outputs import DeclaredFunction, check_output_name
from tallystick.tasks.read import BatchFunction


def with_columns(cluster: Cluster, steps: Iterable[Step]) -> tuple[Step, ...]:
    """Return the steps, with the columns that were declared for functions of `map_batches`.

    Raises:
        OptionError: they cannot be read.
    """
    return tuple(
        replace(step, function=_declared(cluster, step)) if isinstance(step, MapBatches) else step
        for step in steps
    )


def _declared(cluster: Cluster, step: MapBatches) -> BatchFunction:
    function = step.function
    if step.schema is None and not step.outputs:
        return function
    what = f"map_batches {getattr(function, '__name__', function)}"
    outputs = {
        name: columns_of(cluster, columns, f"{what}, output {name!r}")
        for name, columns in step.outputs.items()
    }
    columns = None if step.schema is None else columns_of(cluster, step.schema, f"{what}, schema=")
    return DeclaredFunction(function, outputs, columns)


def side_outputs(
    steps: Iterable[Step], keyed: Iterable[KeyedStep], topology: OutputTopology
) -> dict[str, pa.Schema]:
    """Return the columns of each side output of a pipeline, checked against its sinks.

    Several steps may put out rows for one output, if it has the same columns in each.

    Args:
        steps: as `with_columns` returns them.
        keyed: the keyed ones.
        topology: the sinks.

    Raises:
        OptionError: a name cannot be one, two steps mean different columns, no sink writes an
            output, or the output of a sink is not there.
    """
    functions = [step.function for step in steps if isinstance(step, MapBatches)]
    declared: list[tuple[str, Mapping[str, pa.Schema]]] = [
        (f"map_batches {function.__name__}", function.outputs)
        for function in functions
        if isinstance(function, DeclaredFunction)
    ]
    declared += [(f"step {step.uid}", step.outputs) for step in keyed]
    columns_by_name: dict[str, pa.Schema] = {}
    whose: dict[str, str] = {}
    for what, outputs in declared:
        for name, columns in outputs.items():
            check_output_name(name, what)
            if not columns_by_name.setdefault(name, columns).equals(columns):
                raise OptionError(
                    f"{whose[name]} and {what} both have an output {name!r}, with different "
                    f"columns, {columns_by_name[name].names} and {columns.names}: its sinks get "
                    f"one kind of rows. Rename one, or declare the same columns and types in both"
                )
            whose.setdefault(name, what)
    _check_written(columns_by_name, topology)
    return columns_by_name


def _check_written(outputs: Mapping[str, pa.Schema], topology: OutputTopology) -> None:
    written = {selection.output for selection in topology.selections.values() if selection.output}
    for name in sorted({*written, *topology.dropped} - outputs.keys()):
        known = f"the pipeline's are {', '.join(outputs)}" if outputs else "the pipeline has none"
        raise OptionError(
            f"write({name}=...): no step has an output {name!r}: {known}. Declare it where its "
            f"rows come from: vectorised(..., outputs={{{name!r}: 'user string, why string'}}) or "
            f"map_batches(..., outputs=...)"
        )
    for name in outputs:
        if name not in written and name not in topology.dropped:
            raise OptionError(
                f"no sink gets the output {name!r}, and its rows would be lost: name one, "
                f"write(..., {name}=sink), or say that they are not wanted: write(..., {name}=[])"
            )
    for what, function in topology.functions:
        try:
            dumps(function)
        except Exception as error:
            name = str(getattr(function, "__name__", type(function).__name__))
            raise OptionError(
                f"{what} {name} cannot be sent to the tasks that call it: {error}. "
                f"It must not use locks, clients, sessions and the like"
            ) from error
