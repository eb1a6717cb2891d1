"""Hints for users of pandas, Polars and Spark about errors in their functions of batches.

And warnings about functions that never return rows: mostly a `return` was forgotten.
"""

import dis
import inspect
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pyarrow as pa

from tallystick.arguments import near

logger = logging.getLogger(__name__)

SILENT_BATCHES_MAX = 10
"""The number of batches without a row, from the first on, that is worth a warning."""
_silent_batches: dict[Any, int] = {}
"""The batches for which each function returned nothing so far; -1: it has returned rows, or was
warned about."""

_WHOLE = (
    "a column of the batch is an Arrow array, which pyarrow.compute reckons with as a whole, e.g. "
    "pc.greater(rows['delay'], 15)"
)
_BATCH = (
    "a function gets a pyarrow.RecordBatch: rows['column'], rows.filter(…), rows.select([…]), or "
    "rows.to_pandas(), and back pa.RecordBatch.from_pandas(frame, preserve_index=False); with the "
    "annotation rows: pd.DataFrame, or pl.DataFrame, a frame"
)
_SCALAR = (
    "one value of a column is an Arrow scalar: rows['delay'][0].as_py() is Python's. For all rows "
    "at once, pc.greater(rows['delay'], 15)"
)
_LOOP = (
    "a loop over a batch gives its columns, not its rows: rows.to_pylist() makes dicts of them; "
    "pyarrow.compute reckons with whole columns"
)
_SET = (
    "a batch never changes: rows.append_column('n', column) and rows.set_column(number, 'n', "
    "column) return another one"
)
_BY_TEXT = (
    (r"'str' object cannot be interpreted as an integer|list indices must be int", _LOOP),
    (r"does not support item (?:assignment|deletion)", _SET),
    (r"'pyarrow\.lib\.\w*Scalar'", _SCALAR),
    (r"not supported between instances of .*'pyarrow\.", _WHOLE),
    (r"unsupported operand type.*'?pyarrow\.|bad operand type.*'pyarrow\.", _WHOLE),
    (r"only implemented for.*pyarrow|'pyarrow\.lib\.\w*Array' object", _WHOLE),
    (r"'pyarrow\.lib\.(?:RecordBatch|Table)' object", _BATCH),
    (
        r"has no kernel matching input types",
        "cast one, as in pc.cast(rows['n'], 'int64')",
    ),
)


@contextmanager
def hinting(rows: pa.RecordBatch) -> Iterator[None]:
    """Add to an error of a user's function what Arrow's or Python's words for it mean here."""
    try:
        yield
    except (SystemExit, StopIteration) as error:
        refused = RuntimeError(
            f"{error!r} ends a process of tasks: a function that wants to end the run raises an "
            f"error, such as ValueError"
        )
        raise refused.with_traceback(error.__traceback__) from None
    except (TypeError, AttributeError, KeyError, NotImplementedError, ImportError) as error:
        hint = _hint(error, rows) if len(error.args) == 1 else ""
        if hint and hint not in str(error.args[0]):  # a predicate's call stands in a function's
            error.args = (f"{error.args[0]}: {hint}",)
            if isinstance(error, ImportError):  # the text is not that of `args`
                error.msg = error.args[0]
        raise


def _hint(error: Exception, rows: pa.RecordBatch) -> str:
    text = str(error.args[0])
    if isinstance(error, KeyError):
        name = re.fullmatch(r'Field "(.*)" does not exist in schema', text)
        return near(name[1], rows.schema.names).strip() if name else ""
    if isinstance(error, ModuleNotFoundError):
        return f"the Python of the tasks, {sys.executable}, does not have it: install it there"
    return next((hint for pattern, hint in _BY_TEXT if re.search(pattern, text)), "")


def remedy_of(returned: object) -> str:
    """Return how to make a batch of another value that a function returned; "": as it says."""
    module = type(returned).__module__.partition(".")[0]
    if module == "pandas":
        return (
            ": pa.RecordBatch.from_pandas(frame, preserve_index=False) makes one, and so does the "
            "annotation -> pd.DataFrame"
        )
    if module == "polars":
        return ": frame.to_arrow() makes one, and so does the annotation -> pl.DataFrame"
    if module == "pyspark":
        return ": Spark's DataFrames are for transform()"
    if isinstance(returned, list | tuple):
        return ": pa.RecordBatch.from_pylist(rows) makes one of a list of dicts"
    if isinstance(returned, dict):
        return ": pa.RecordBatch.from_pydict(columns) makes one"
    if isinstance(returned, pa.Array | pa.ChunkedArray | bool):
        return ": to keep some rows, return rows.filter(mask), or use Pipeline.filter()"
    if inspect.isgenerator(returned):
        return ": it has yield in it, and what it returns is made once, at the end"
    return ""


def name_of(function: object) -> str:
    """Return the name of a function, or of the class of an object that can be called."""
    if isinstance(function, partial):
        return name_of(function.func)
    return str(getattr(function, "__name__", type(function).__name__))


def place_of(function: object) -> str:
    """Return name, file and line of a function."""
    code = getattr(function, "__code__", None)
    name = name_of(function)
    return f"{name} ({os.path.basename(code.co_filename)}:{code.co_firstlineno})" if code else name


def returns_nothing(function: Callable[..., Any]) -> bool:
    """True if a function has an end, and returns None wherever it ends."""
    code = getattr(function, "__code__", None)
    if code is None or inspect.isgeneratorfunction(function):
        return False
    instructions = [*dis.get_instructions(code)]
    returned = [
        one.argval if one.opname == "RETURN_CONST" else _constant(before, one)
        for before, one in zip([None, *instructions], instructions, strict=False)
        if one.opname in ("RETURN_VALUE", "RETURN_CONST")
    ]
    return bool(returned) and all(value is None for value in returned)


def _constant(before: dis.Instruction | None, returning: dis.Instruction) -> object:
    """Return the constant that an instruction returns, or something else than None."""
    if before is None or before.opname != "LOAD_CONST" or returning.is_jump_target:
        return ...
    return before.argval


def warn_of_silence(step: str, function: object) -> None:
    """Warn that a function drops every row."""
    logger.warning(
        "%s %s returns None, no rows, for every batch: all rows are dropped. Has it no return?",
        step,
        place_of(function),
    )


def note_result(step: str, function: object, *, is_none: bool) -> None:
    """Count batches for which a function returns nothing; warn once where these are all so far."""
    key = getattr(function, "__code__", None) or type(function)
    count = _silent_batches.get(key, 0)
    if count < 0:
        return
    _silent_batches[key] = count + 1 if is_none else -1
    if _silent_batches[key] == SILENT_BATCHES_MAX:
        _silent_batches[key] = -1
        warn_of_silence(step, function)
