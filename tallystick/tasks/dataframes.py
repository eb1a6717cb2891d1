"""pandas and Polars frames in functions of `map_batches` whose annotations name them.

    def late_only(rows: pl.DataFrame) -> pl.DataFrame: ...

Values keep their types on the way there and back: pandas frames have Arrow's own types
(`pd.ArrowDtype`), in which a whole number may be null, and a decimal or a time stays exact.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import pyarrow as pa

from tallystick.errors import OptionError
from tallystick.tasks.hints import name_of, place_of

FRAMES = ("pandas", "polars")
OTHERS = ("pyspark",)
"""Libraries whose frames are no batches of rows."""
_USUAL_NAMES = {"pl": "polars", "polars": "polars", "pd": "pandas", "pandas": "pandas"}
"""Modules by their names in annotations, where only type checkers import them."""


@dataclass(frozen=True)
class DataFrameFunction:
    """A function of `map_batches` that gets, or returns, frames of pandas or Polars.

    Args:
        function: as the user wrote it.
        libraries: of the frame that each argument is, by place; "": Arrow.
    """

    function: Callable[..., Any]
    libraries: tuple[str, ...]

    @property
    def __name__(self) -> str:
        """The name of the user's function, for messages."""
        return name_of(self.function)

    def __call__(self, *arguments: Any) -> Any:
        """Call the function with frames, and return Arrow tables in place of its frames."""
        frames = map(frame_of, arguments, self.libraries)
        result = self.function(*frames)
        if isinstance(result, tuple):  # the rows and the elements of a list state
            return tuple(map(self._arrow, result))
        return self._arrow(result)

    def _arrow(self, rows: Any) -> Any:
        return as_arrow(rows, f"map_batches {place_of(self.function)}: ")


def with_frames(function: Any, argument_count: int) -> Any:
    """Return a function that takes Arrow batches: the function itself unless it names frames.

    Args:
        function: as the user wrote it.
        argument_count: the rows, and the state if the step has one.

    Raises:
        OptionError: an annotation names a library that is missing, or another kind of frame.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of a compiled library
        return function
    names = _names_of(function)
    parameters = [*signature.parameters.values()][:argument_count]
    annotations = [parameter.annotation for parameter in parameters]
    libraries = [_library(function, annotation, names) for annotation in annotations]
    result = _library(function, signature.return_annotation, names)
    if not any((*libraries, result)):
        return function
    for library in {*libraries, result} - {""}:
        _check_installed(function, library)
    missing = argument_count - len(libraries)  # they are in *args
    return DataFrameFunction(function, (*libraries, *[""] * missing))


def _names_of(function: Any) -> Mapping[str, Any]:
    """Return what names mean where a function is written."""
    while isinstance(function, partial):
        function = function.func
    if not hasattr(function, "__globals__"):
        function = type(function).__call__
    function = inspect.unwrap(getattr(function, "__func__", function))
    cells = getattr(function, "__closure__", None) or ()
    code = getattr(function, "__code__", None)
    enclosing = {}
    for name, cell in zip(code.co_freevars if code else (), cells, strict=False):
        try:
            enclosing[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    return {**getattr(function, "__globals__", {}), **enclosing}


def _library(function: Any, annotation: Any, names: Mapping[str, Any]) -> str:
    """Return the library of the frame that an annotation names; "": it names none.

    Raises:
        OptionError: it is a Series, a LazyFrame or a DataFrame of Spark.
    """
    for kind in _kinds(annotation, names):
        module, _, _ = kind.__module__.partition(".")
        if module in FRAMES and kind.__name__ == "DataFrame":
            return module
        if module in (*FRAMES, *OTHERS):
            hint = ": Spark's DataFrames are for transform()" if module in OTHERS else ""
            raise OptionError(
                f"map_batches(function={place_of(function)}): it is annotated with "
                f"{module}.{kind.__name__}: expected a pyarrow.RecordBatch, a polars.DataFrame or "
                f"a pandas.DataFrame{hint}"
            )
    return ""


def _kinds(annotation: Any, names: Mapping[str, Any]) -> Iterator[type]:
    """Yield the classes in an annotation, which may be text (`from __future__`)."""
    if isinstance(annotation, str):
        for text in re.findall(r"[A-Za-z_][\w.]*", annotation):
            first, *rest = text.split(".")
            value = names.get(first)
            if value is None and rest == ["DataFrame"] and first in _USUAL_NAMES:
                yield type("DataFrame", (), {"__module__": _USUAL_NAMES[first]})
            for name in rest:
                value = getattr(value, name, None)
            yield from _kinds(value, names) if not isinstance(value, str) else ()
        return
    if isinstance(annotation, type) and not get_args(annotation):
        yield annotation
    for argument in get_args(annotation):
        yield from _kinds(argument, names)


def _check_installed(function: Any, library: str) -> None:
    try:
        if library == "polars":
            import polars  # noqa: F401
        else:
            import pandas  # noqa: F401
    except ImportError as error:
        raise OptionError(
            f"map_batches(function={place_of(function)}): it is annotated with "
            f"{library}.DataFrame, and {library} cannot be imported ({error}): pip install "
            f"{library}, on each worker too"
        ) from None


def frame_of(rows: Any, library: str) -> Any:
    """Return Arrow rows as a frame of a library; "": as they are."""
    if library == "polars":
        import polars

        return polars.from_arrow(rows)
    if library == "pandas":
        import pandas

        # Metadata of an earlier frame would bring its index back.
        return rows.replace_schema_metadata(None).to_pandas(types_mapper=pandas.ArrowDtype)
    return rows


def as_arrow(rows: Any, what: str = "") -> Any:
    """Return a frame as Arrow rows, of the types that batches from Kafka have.

    Args:
        rows: a frame; anything else is returned as it is.
        what: returned the frame, for the message.

    Raises:
        OptionError: a pandas frame has values in its index.
    """
    library = type(rows).__module__.partition(".")[0]
    if type(rows).__name__ != "DataFrame" or library not in FRAMES:
        return rows
    if library == "polars":
        import polars

        table = rows.to_arrow(compat_level=polars.CompatLevel.oldest())
    else:
        if named := [str(name) for name in rows.index.names if name is not None]:
            raise OptionError(
                f"{what}a pandas frame has {', '.join(map(repr, named))} in its index, which is no "
                f"column: .reset_index() makes one of it, .reset_index(drop=True) drops it, and "
                f"groupby(…, as_index=False) never makes an index"
            )
        table = pa.Table.from_pandas(rows, preserve_index=False)
    return table.cast(pa.schema([(field.name, _plain(field.type)) for field in table.schema]))


def _plain(kind: pa.DataType) -> pa.DataType:
    """Return a type without its variants for large arrays, views and dictionaries."""
    types = pa.types
    if types.is_large_string(kind) or types.is_string_view(kind):
        return pa.string()
    if types.is_large_binary(kind) or types.is_binary_view(kind):
        return pa.binary()
    if types.is_dictionary(kind):
        return _plain(kind.value_type)
    if types.is_list(kind) or types.is_large_list(kind):
        item = kind.value_field
        return pa.list_(item.with_type(_plain(item.type)))
    if types.is_map(kind):
        return pa.map_(_plain(kind.key_type), _plain(kind.item_type))
    if types.is_struct(kind):
        return pa.struct([field.with_type(_plain(field.type)) for field in kind])
    return kind
