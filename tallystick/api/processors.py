"""The function of a `process` step, and its spans of time, as a user gives them."""

import reprlib
import sys
from typing import TYPE_CHECKING, TypeGuard, cast

from pyspark.sql import DataFrame

from tallystick.errors import OptionError
from tallystick.state.functions.aggregates import Aggregate
from tallystick.state.functions.processing import NO_TIME, Processor
from tallystick.tasks.steps import Columns
from tallystick.text import duration_ms

if TYPE_CHECKING:
    from pyspark.sql.streaming.stateful_processor import StatefulProcessor  # PySpark 3.5 has none

_OF_A_PROCESSOR = ("time_mode", "has_timers", "reads", "declared", "output", "run")


def processor_of(
    function: "StatefulProcessor | Processor",
    output: Columns | None,
    time_mode: str | None,
    rows: str,
    initial_state: DataFrame | None,
) -> Processor:
    """Return the function given to `process` as the processor of a step.

    Raises:
        OptionError: the argument is no such function, or other arguments do not fit it.
    """
    if not _is_stateful_processor(function):
        processor = cast(Processor, function)
        _check_own(processor, time_mode, rows, initial_state)
        return processor
    from tallystick.state.pyspark.processor import row_processor

    if output is None:
        raise OptionError(
            f"process({type(function).__name__}()): a StatefulProcessor needs output=, the "
            f"columns of the rows that it returns, e.g. output='user string, n bigint'"
        )
    mode = time_mode or NO_TIME
    return row_processor(
        function, output=output, rows=rows, time_mode=mode, initial_state=initial_state
    )


def _is_stateful_processor(function: object) -> "TypeGuard[StatefulProcessor]":
    module = sys.modules.get("pyspark.sql.streaming.stateful_processor")  # as its class imports it
    return module is not None and isinstance(function, module.StatefulProcessor)


def _check_own(
    processor: Processor, time_mode: str | None, rows: str, initial_state: DataFrame | None
) -> None:
    if isinstance(processor, Aggregate):
        raise OptionError(
            "process(): count(), sum() and the like are columns of an aggregate, not a function by "
            'themselves. Wrap it: ts.aggregate({"n": ts.count()}), or in ts.windowed(...)'
        )
    if not all(hasattr(processor, name) for name in _OF_A_PROCESSOR) or isinstance(processor, type):
        raise OptionError(
            f"process({_shown(processor)}): expected a StatefulProcessor, a function made with "
            f"vectorised(...), or a ready-made one such as deduplicate(). {_meant(processor)}"
        )
    if time_mode not in (None, processor.time_mode):
        raise OptionError(
            f"time_mode={time_mode!r}: the function has time mode {processor.time_mode!r} already"
        )
    if rows != "row" or initial_state is not None:
        raise OptionError("rows= and initial_state= are for a StatefulProcessor: leave them out")


def delays_ms(**delays: str | int) -> dict[str, int]:
    """Return delays in ms, by the names of the fields of `Process`."""
    return {f"{name}_ms": duration_ms(name, delay) for name, delay in delays.items()}


def ahead_ms(given: str | int | None) -> int | None:
    """Return how far event times may be ahead of the clock, in ms; None: without limit."""
    return None if given is None else duration_ms("event_time_max_ahead", given)


def _meant(given: object) -> str:
    """Return the words that say how an argument of `process` becomes a processor."""
    name = getattr(given, "__name__", type(given).__name__)
    if isinstance(given, type):
        return f"This is a class: write process({name}())"
    if callable(getattr(given, "handleInputRows", None)):
        return f"Derive the class from Spark's: class {name}(StatefulProcessor)"
    if callable(given):
        return (
            "A function of a KeyedBatch becomes one by ts.vectorised(function, state='n bigint'); "
            "without state, use map_batches before key_by"
        )
    return f"This is {reprlib.repr(given)}"


def _shown(given: object) -> str:
    return str(getattr(given, "__name__", f"{type(given).__name__}(…)"))
