"""The routing of rows to the sinks in `Pipeline.write`: by output, predicate and function."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pyarrow as pa

from tallystick.arguments import checked
from tallystick.epoch.two_phase import Sink
from tallystick.errors import OptionError
from tallystick.expressions.binding import condition_of
from tallystick.tasks.dataframes import with_frames
from tallystick.tasks.outputs import MAIN, Batch, Predicate, Selection, check_output_name

Function = Callable[[pa.RecordBatch], Batch]


@dataclass(frozen=True)
class RoutedSink:
    """A sink behind a predicate or functions of the rows; made by `when` and `mapped`."""

    sink: Sink
    predicate: Predicate | None = None
    functions: tuple[Function, ...] = ()


@checked
def mapped(sink: Sink | RoutedSink, function: Function) -> RoutedSink:
    """Pass rows through a function on their way to a sink of `Pipeline.write`.

    Args:
        sink: any; a sink that is mapped already applies its own function to the result.
        function: gets a `pyarrow.RecordBatch` and returns one, a `pyarrow.Table` or None, as for
            `map_batches`. It runs in the tasks, must not keep state, and has no side outputs.

    Raises:
        OptionError: the sink is one of `when`.
    """
    routed = sink if isinstance(sink, RoutedSink) else RoutedSink(sink)
    if routed.predicate is not None:
        raise OptionError(
            "mapped(when(...)): rows are chosen before they are mapped: write "
            "when(mapped(sink, function), predicate)"
        )
    return replace(routed, functions=(with_frames(function, 1), *routed.functions))


@checked
def when(sink: Sink | RoutedSink, predicate: Predicate | str) -> RoutedSink:
    """Let only some rows through to a sink of `Pipeline.write`.

    Args:
        sink: any; of one that is `mapped`, the rows before that.
        predicate: in Spark's SQL, "amount > 100"; or a function that gets a `pyarrow.RecordBatch`
            and returns a column of booleans, one for each row. Null is false. It runs in the tasks,
            must not keep state, and may be called for fewer batches than the output has.

    Raises:
        OptionError: the sink has a predicate already.
    """
    routed = sink if isinstance(sink, RoutedSink) else RoutedSink(sink)
    if routed.predicate is not None:
        raise OptionError("when(when(...)): give one predicate: pc.and_(first, second)")
    if isinstance(predicate, str):
        predicate = condition_of(predicate, "when")
    return replace(routed, predicate=predicate)


class SinkRouting(NamedTuple):
    """The sinks of a pipeline in their order, with the rows of each, and outputs without a sink."""

    sinks: tuple[Sink, ...]
    selections: tuple[Selection, ...]
    dropped: tuple[str, ...]


AnySink = Sink | RoutedSink


def routing_of(
    main: Iterable[AnySink],
    outputs: Mapping[str, AnySink | Sequence[AnySink]],
    before: Sequence[Sink],
) -> SinkRouting:
    """Return the routing of the arguments of `write`, the sinks of the main output first.

    Args:
        main: the sinks of the main output.
        outputs: the sinks of side outputs, by name.
        before: the sinks of an earlier call.

    Raises:
        OptionError: a name cannot be an output's, or the main output has no sink; or there was an
            earlier call, whose sinks would get nothing.
    """
    if before:
        raise OptionError(
            "write() was called before: a pipeline has one write(), which gets all sinks, as in "
            "write(topic, files)"
        )
    routed = [_routed(MAIN, sink) for sink in main]
    if outputs and not routed:
        raise OptionError(
            f"write({', '.join(outputs)}): no sink gets the main output, the rows that the last "
            f"step returns: name one first, write(sink, {next(iter(outputs))}=...). Where a "
            f"function has side outputs only, let it return one of them as the main one"
        )
    dropped = []
    for name, given in outputs.items():
        check_output_name(name, "write()")
        several: list[Any] = [*given] if isinstance(given, list | tuple) else [given]
        routed += [_routed(name, sink) for sink in several]
        dropped += [] if several else [name]
    return SinkRouting(
        tuple(sink for sink, _ in routed),
        tuple(selection for _, selection in routed),
        tuple(dropped),
    )


def _routed(output: str, given: Any) -> tuple[Sink, Selection]:
    routed = given if isinstance(given, RoutedSink) else RoutedSink(given)
    return routed.sink, Selection(output, routed.predicate, routed.functions)
