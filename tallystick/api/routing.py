"""The sinks of a pipeline as `write` gets them: of which output, and which of its rows."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tallystick.epoch.two_phase import Sink
from tallystick.errors import OptionError
from tallystick.run.outputs import MAIN, Predicate, Selection, check_output_name


@dataclass(frozen=True)
class FilteredSink:
    """A sink that gets some rows of its output; made by `when`."""

    sink: Sink
    predicate: Predicate


def when(sink: Sink, predicate: Predicate) -> FilteredSink:
    """Let only some rows through to a sink of `Pipeline.write`.

    Args:
        sink: any.
        predicate: gets a `pyarrow.RecordBatch` and returns a column of booleans, one for each row;
            null is false. It runs in the tasks, must not keep state, and may be called for fewer
            batches than the output has.

    Raises:
        OptionError: the sink has a predicate already, or this is no function.
    """
    if isinstance(sink, FilteredSink):
        raise OptionError("when(when(...)): give one predicate: pc.and_(first, second)")
    if not callable(predicate):
        raise OptionError(
            f"when({predicate!r}): expected a function of a batch, e.g. "
            f"lambda rows: pc.greater(rows['delay'], 15)"
        )
    if not hasattr(sink, "open"):
        raise OptionError(f"when({sink!r}, ...): expected a sink first, and then the predicate")
    return FilteredSink(sink, predicate)


class SinkRouting(NamedTuple):
    """The sinks of a pipeline in their order, with the rows of each, and outputs without a sink."""

    sinks: tuple[Sink, ...]
    selections: tuple[Selection, ...]
    dropped: tuple[str, ...]


AnySink = Sink | FilteredSink


def routing_of(
    main: Iterable[AnySink], outputs: Mapping[str, AnySink | Sequence[AnySink]]
) -> SinkRouting:
    """Return what `write` was given, the sinks of the main output first.

    Raises:
        OptionError: a name cannot be one of an output, something is no sink, or the main output
            has none.
    """
    routed = [_routed(MAIN, each) for each in main]
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
        routed += [_routed(name, each) for each in several]
        dropped += [] if several else [name]
    return SinkRouting(
        tuple(sink for sink, _ in routed),
        tuple(selection for _, selection in routed),
        tuple(dropped),
    )


def _routed(output: str, given: Any) -> tuple[Sink, Selection]:
    sink = given.sink if isinstance(given, FilteredSink) else given
    if not hasattr(sink, "open"):
        place = f"write({output}=...)" if output else "write()"
        raise OptionError(
            f"{place}: {given!r} is no sink: expected a KafkaSink, PostgresSink, FileSink, or one "
            f"of your own; for several, "
            + (f"a list, write({output}=[a, b])" if output else "one after the other, write(a, b)")
        )
    return sink, Selection(output, given.predicate if isinstance(given, FilteredSink) else None)
