"""Output of commands: tables for people, JSON for programs."""

import json
import os
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tallystick.epoch.manifest import KAFKA
from tallystick.epoch.savepoint import Savepoint
from tallystick.ops.due import DueSink
from tallystick.ops.inspection import Report, StepReport, state_text
from tallystick.source.offsets import ONLY_INPUT, parse_source
from tallystick.state.catalog import StepState
from tallystick.state.keys import KeyCodec
from tallystick.text import printable, shortened

SHOWN_MAX = 20
"""At most this many lines of a kind; JSON has them all."""
WIDTH = 160


def console() -> Console:
    """Return a console for tables, as wide as they need where the output is no terminal."""
    return Console(width=None if os.isatty(1) else WIDTH)


def as_json(value: Any) -> str:
    """Return a dataclass, or a value of JSON's own types, as JSON."""
    return json.dumps(asdict(value) if hasattr(value, "__dataclass_fields__") else value, indent=2)


def show_report(report: Report, out: Console) -> None:
    """Show a checkpoint as tables."""
    facts = Table(show_header=False, box=None)
    for name, value in _facts(report):
        facts.add_row(name, plain(value))
    out.print(facts)
    _show_positions(report, out)
    for step in report.steps:
        _show_step(step, out)
    _show_epochs(report, out)
    _show_outputs(report, out)
    _show_list("decided, and not published yet", tuple(map(due_text, report.due)), out)
    if report.rubbish:
        count = len(report.rubbish)
        out.print(f"{count} older files, which the pipeline removes by itself (--json names them)")
    for note in report.notes:
        out.print(plain(note))


def _facts(report: Report) -> list[tuple[str, str]]:
    under_way = report.logged != report.epoch
    whole = "none" if report.newest_whole is None else str(report.newest_whole)
    how = "every byte compared" if report.verified else "files are there; --verify reads them"
    facts = [
        ("checkpoint", report.location),
        ("pipeline", report.pipeline),
        ("lineage", report.lineage),
        ("newest epoch", f"{report.epoch}" + (f" ({report.logged} planned)" * under_way)),
        ("newest whole epoch", f"{whole} ({how})"),
    ]
    if report.origin:
        facts.append(("restored from", report.origin))
    return facts


def _show_positions(report: Report, out: Console) -> None:
    table = Table("source", "partition", "next offset", title="positions", title_justify="left")
    rows = [
        (str(number) if uid == ONLY_INPUT else uid, partition, str(offset))
        for number, (uid, positions) in enumerate(zip(report.inputs, report.positions, strict=True))
        for partition, offset in positions.items()
    ]
    for row in rows[:SHOWN_MAX]:
        table.add_row(*map(plain, row))
    if rows:
        out.print(table)
    _say_more(len(rows), out)


def _show_step(step: StepReport, out: Console) -> None:
    out.print(
        plain(
            f"step {step.uid!r}: key {step.key}, {step.max_parallelism} key groups, states: "
            f"{', '.join(step.states) or 'none'}"
        )
    )
    out.print(
        f"  {size_text(step.size)} in {step.snapshots} snapshots and {step.changelogs} changelogs, "
        f"{step.entries} entries in them; skew {step.skew:.2f}; with the next epoch: "
        f"{len(step.snapshots_due)} snapshots, {step.merges_due} changelogs merged",
        markup=False,
    )
    table = Table("task", "key groups", "size", "files")
    for index, part in enumerate(step.parts[:SHOWN_MAX]):
        groups = f"{part.first} to {part.last}"
        table.add_row(str(index), groups, size_text(part.size), str(part.files))
    out.print(table)
    _say_more(len(step.parts), out)


def _show_epochs(report: Report, out: Console) -> None:
    table = Table("epoch", "manifest", "state", title="retained epochs", title_justify="left")
    for epoch in report.epochs[-SHOWN_MAX:]:
        state = "whole" if not epoch.problems else f"{len(epoch.problems)} files missing or damaged"
        table.add_row(str(epoch.number), plain(epoch.manifest_path), state)
    out.print(table)
    problems = {problem: None for epoch in report.epochs for problem in epoch.problems}
    _show_list("missing or damaged", tuple(problems), out)


def _show_outputs(report: Report, out: Console) -> None:
    """Print the decider of each epoch, and the output made visible in each sink."""
    table = Table("epoch", "decided by", "its output is", "rows in the deciding transaction",
                  "prepared in other sinks", title="output", title_justify="left")  # fmt: skip
    for output in report.outputs[-SHOWN_MAX:]:
        sinks = [
            f"{sink.uid}: {sink.records} rows in {sink.transactions} transaction"
            + "s" * (sink.transactions != 1)
            for sink in output.sinks
        ]
        decided_by = "Kafka" if output.decided_by == KAFKA else "the checkpoint"
        table.add_row(str(output.epoch), decided_by, output.standing, str(output.records),
                      plain("; ".join(sinks)) or "nothing")  # fmt: skip
    out.print(table)
    _say_more(len(report.outputs), out)


def _show_list(title: str, lines: tuple[str, ...], out: Console) -> None:
    if not lines:
        return
    out.print(f"{title}:")
    for line in lines[:SHOWN_MAX]:
        out.print(f"  {plain(line)}", soft_wrap=True)
    _say_more(len(lines), out)


def due_text(due: DueSink) -> str:
    """Describe what waits to be published in a sink."""
    if due.unknown:
        return f"sink {due.sink}: whether epochs wait to be published is not known: {due.unknown}"
    return (
        f"sink {due.sink}: {due.epochs} epochs with {due.rows} rows, in {due.files} files of "
        f"{size_text(due.size)}, are decided and wait to be published in {due.location}, for "
        f"{time_text(due.waited_ms)} (commit_every is {time_text(due.every_ms)})"
    )


def _say_more(count: int, out: Console) -> None:
    if count > SHOWN_MAX:
        out.print(f"  … and {count - SHOWN_MAX} more (--json has them all)")


def savepoint_json(location: str, savepoint: Savepoint) -> dict[str, Any]:
    """Return a savepoint as JSON, for `list` and `describe`."""
    manifest = savepoint.manifest
    return {
        "location": location,
        "name": savepoint.name,
        "created": savepoint.created,
        "pipeline": manifest.pipeline,
        "epoch": manifest.checkpoint_id,
        "checkpoint": savepoint.checkpoint,
        "lineage": manifest.lineage,
        "bytes": sum(map(_size, manifest.state)),
        "steps": [
            {
                "uid": step.uid,
                "max_parallelism": step.max_parallelism,
                "parallelism": step.parallelism,
                "key": step.key_schema,
                "states": [state_text(field) for field in step.fields],
                "files": len(step.files),
                "bytes": _size(step),
            }
            for step in manifest.state
        ],
        "sources": [_source(text) for text in manifest.sources if text.startswith("{")],
    }


def _key_text(step: StepState) -> str:
    """Return the columns of a step's key as DDL writes them."""
    key = KeyCodec.from_text(step.key_schema).schema
    return ", ".join(f"{field.name} {field.type}" for field in key)


def _size(step: StepState) -> int:
    return sum(file.size for file in step.files)


def _source(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # of a source of other software
        return text


def plain(text: str) -> str:
    """Return a text as it stands in a table, where brackets would be markup."""
    return escape(printable(text))


def show_savepoints(savepoints: list[dict[str, Any]], out: Console) -> None:
    """Print savepoints, a line each."""
    table = Table("name", "created (UTC)", "pipeline", "epoch", "size", "of")
    for savepoint in savepoints:
        cells = (
            savepoint["name"],
            savepoint["created"],
            savepoint["pipeline"],
            str(savepoint["epoch"]),
            size_text(savepoint["bytes"]),
            savepoint["checkpoint"],
        )
        table.add_row(*map(plain, cells))
    out.print(table)


def show_savepoint(location: str, savepoint: Savepoint, out: Console) -> None:
    """Print a savepoint: pipeline and epoch, positions of the inputs, state of the steps."""
    manifest = savepoint.manifest
    facts = Table(show_header=False, box=None)
    for name, value in (
        ("savepoint", location),
        ("created (UTC)", savepoint.created),
        ("pipeline", manifest.pipeline),
        ("epoch", str(manifest.checkpoint_id)),
        ("of checkpoint", savepoint.checkpoint),
        ("state", size_text(sum(map(_size, manifest.state)))),
    ):
        facts.add_row(name, plain(value))
    out.print(facts)
    offsets = [
        f"{partition} at offset {offset}"
        for source in map(parse_source, manifest.sources)
        if source is not None
        for partition, offset in sorted(source.positions.items())
    ]
    _show_list("goes on reading", tuple(offsets), out)
    if not manifest.state:
        return
    table = Table("step", "key", "key groups", "tasks", "states", "files", "size")
    for step in manifest.state:
        states = "\n".join(state_text(field) for field in step.fields)
        counts = (step.max_parallelism, step.parallelism)
        size = (str(len(step.files)), size_text(_size(step)))
        table.add_row(
            plain(step.uid), plain(_key_text(step)), *map(str, counts), plain(states), *size
        )
    out.print(table)


def size_text(size: float) -> str:
    """Return a number of bytes, for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def show_transactions(transactions: list[dict[str, Any]], out: Console) -> None:
    """Print transactions that linger, a line each; see `cli` for their fields."""
    table = Table()
    for title in ("transaction", "state", "producer", "age", "timeout", "rows in", "what it is"):
        table.add_column(title, overflow="fold")  # no name is cut short
    for transaction in transactions:
        cells = (
            transaction["transaction"],
            state_of(transaction),
            producer_of(transaction),
            time_text(transaction["age_ms"]),
            time_text(transaction["timeout_ms"]) if transaction["timeout_ms"] else "never",
            shortened(transaction["partitions"], 3),
            transaction["says"],
        )
        table.add_row(*map(escape, cells))
    out.print(table)


def state_of(fields: dict[str, Any]) -> str:
    """Return the state of a transaction, for people."""
    state = str(fields["state"])
    if state != "Ongoing":
        return state
    return "open, prepared" if fields["prepared"] else "open, being written"


def producer_of(fields: dict[str, Any]) -> str:
    """Return the writer of a transaction."""
    if fields["producer_id"] is None:
        return ""
    return f"{fields['producer_id']}, epoch {fields['producer_epoch']}"


def time_text(ms: int | None) -> str:
    """Return a duration, for people."""
    if ms is None:
        return "not known"
    seconds = ms // 1000
    if seconds < 120:
        return f"{seconds} s"
    return f"{seconds // 60} min" if seconds < 7200 else f"{seconds // 3600} h"
