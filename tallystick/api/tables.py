"""A table of rows with their types, as text for terminals and as HTML for notebooks."""

from html import escape

import pyarrow as pa

from tallystick.codec.ddl import ddl_of_type

SHOWN_MAX = 20
WIDTH_MAX = 40


def counted(row_count: int, shown_count: int = SHOWN_MAX) -> str:
    """Return the line below a table: its rows, and how many of these are shown."""
    rows = "1 row" if row_count == 1 else f"{row_count} rows"
    return rows + (f", the first {shown_count} shown" if row_count > shown_count else "")


def as_text(table: pa.Table, last_line: str) -> str:
    """Return a table for a terminal, columns one below the other."""
    lines = _lines(table)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    return "\n".join([*texts, last_line])


def as_html(table: pa.Table, last_line: str) -> str:
    """Return a table for a notebook."""
    names, types, *rows = _lines(table)
    head = "".join(
        f"<th>{escape(name)}<br><small>{escape(kind)}</small></th>"
        for name, kind in zip(names, types, strict=True)
    )
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table><p>{escape(last_line)}</p>"


def _lines(table: pa.Table) -> list[list[str]]:
    """Return names, types and the first rows, as texts."""
    schema = table.schema
    rows = table.slice(0, SHOWN_MAX).to_pylist()
    cells = [[str(row[name])[:WIDTH_MAX] for name in schema.names] for row in rows]
    return [schema.names, [ddl_of_type(field.type) for field in schema], *cells]
