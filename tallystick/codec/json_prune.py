"""Lines of JSON records without the fields that a schema lacks; see `json_prune_kernels`."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tallystick.codec import json_prune_kernels as kernels
from tallystick.codec.spans import Int64Array

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class _Tree:
    """A schema's nodes, their depth, and the memory of the names that the nodes point to."""

    nodes: Int64Array
    depth: int
    names: Bytes


def warm_up() -> None:
    """Compile the kernel, or load it from the cache."""
    text = np.frombuffer(b"{}\n", np.uint8)
    pruned(text, np.array([0, 3]), pa.schema([("a", pa.string())]))


def pruned(
    text: Bytes, line_starts: Int64Array, schema: pa.Schema
) -> tuple[Bytes, Int64Array, Bytes]:
    """Return lines without the fields that a schema lacks, their starts, and the verdicts.

    Args:
        text: records, each with a line break behind it.
        line_starts: where each line begins, and the end of the last.
        schema: the fields that are kept.
    """
    tree = _tree(schema)
    out = np.empty(len(text), np.uint8)
    starts = np.zeros(len(line_starts), np.int64)
    verdicts = np.zeros(len(line_starts) - 1, np.uint8)
    kernels.prune_records(
        *(text.ctypes.data, line_starts, tree.nodes, tree.depth),
        *(out.ctypes.data, starts, verdicts),
    )
    return out[: starts[-1]], starts, verdicts


@lru_cache(maxsize=64)
def _tree(schema: pa.Schema) -> _Tree:
    rows = [[kernels.STRUCT, 0, 0, 0, 0]]
    names = bytearray()
    depth = _add_parts(0, pa.struct(list(schema)), rows, names)
    nodes, text = np.array(rows, np.int64), np.frombuffer(bytes(names) + b"\0", np.uint8)
    nodes[:, kernels.NAME] += text.ctypes.data
    return _Tree(nodes, depth, text)


def _add_parts(index: int, kind: pa.DataType, rows: list[list[int]], names: bytearray) -> int:
    """Add the parts of a node's type to `rows` and `names`; return the node's depth."""
    parts: Sequence[pa.Field] = ()
    if pa.types.is_struct(kind):
        parts = list(kind)
        rows[index][kernels.KIND] = kernels.STRUCT
    elif pa.types.is_list(kind):
        parts = [kind.value_field]
        rows[index][kernels.KIND] = kernels.LIST
    rows[index][kernels.FIRST : kernels.COUNT + 1] = len(rows), len(parts)
    first = len(rows)
    for part in parts:
        name = part.name.encode()
        rows.append([kernels.VALUE, 0, 0, len(names), len(name)])
        names += name
    depths = [_add_parts(first + place, part.type, rows, names) for place, part in enumerate(parts)]
    return 1 + max(depths, default=0)
