"""The page's HTML: a frame that stays, and sections, each sent again after a change.

One epoch is often far longer than the others: the first, which compiles and connects. To keep the
others legible, an axis of a chart ends soon after the largest of 19 in 20 values, and the values
cut off are named.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from tallystick.ops.cli_show import size_text, time_text
from tallystick.ops.ui.facts import EpochFact, PageFacts
from tallystick.ops.ui.page import PARTS
from tallystick.state.overlay import FINAL_WATERMARK_MS, is_final
from tallystick.text import printable
from tallystick.values import Severity

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
HERE = Path(__file__).parent
SECTIONS = (
    *("summary", "job", "findings", "epochs", "sources", "state", "transactions", "errors"),
    "log",
)
"""Each is a template, and an element of the page."""
SHOWN_MAX = 50
"""At most this many rows of a table; the JSON at `/facts.json` has them all."""


def page(facts: PageFacts, *, may_act: bool = False) -> str:
    """Return the whole page; `may_act`: with actions."""
    return (
        _environment()
        .get_template("page.html")
        .render(
            facts=facts,
            sections=sections(facts),
            title=facts.name or "Tallystick",
            may_act=may_act,
        )
    )


def sections(facts: PageFacts) -> dict[str, str]:
    """Return the HTML of each section, by its name."""
    environment = _environment()
    return {
        name: environment.get_template(f"{name}.html").render(
            facts=facts, run=facts.run, now_ms=facts.looked_ms, SHOWN_MAX=SHOWN_MAX
        )
        for name in SECTIONS
    }


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    environment.filters |= {
        "count": _count,
        "size": size_text,
        "bytes": _bytes,
        "duration": time_text,
        "utc": _utc,
    }
    environment.tests["final"] = is_final
    environment.globals |= {"worst": _worst, "Severity": Severity}
    return environment


def _shown(value: Any) -> Any:
    """Return a text without control characters: a name may come from a file, or from Kafka."""
    return printable(value) if type(value) is str else value


def _count(value: float | None) -> str:
    """Write a number with its thousands apart; None as words."""
    return "not known" if value is None else f"{value:,.0f}"


def _bytes(value: int | None) -> str:
    """Write a number of bytes; None as words."""
    return "not known" if value is None else size_text(value)


def _utc(ms: int | None) -> str:
    """Write a time; any number that a checkpoint may hold is written, and none raises."""
    if ms is None:
        return "not known"
    if ms == FINAL_WATERMARK_MS:
        return "at the end of all inputs"
    try:
        return (EPOCH + timedelta(milliseconds=ms)).strftime("%Y-%m-%d %H:%M:%S UTC")
    except OverflowError:
        return f"{ms} ms since 1970, {'after the year 9999' if ms > 0 else 'before the year 1'}"


def _worst(facts: PageFacts) -> Mapping[str, int]:
    """Count the errors and the warnings among the findings."""
    return {
        "errors": sum(finding.severity == Severity.ERROR for finding in facts.findings),
        "warnings": sum(finding.severity == Severity.WARNING for finding in facts.findings),
    }


CUT_AT_TIMES = 2.0
"""A value that is larger than this many times the largest of the others is cut off."""
ROOM = 1.2
VALUES_MIN = 4
"""In fewer values, none stands out."""


def charts(facts: PageFacts) -> dict[str, Any]:
    """Return all charts as JSON: values of each epoch, ends of axes, and values cut off."""
    epochs = facts.epochs
    parts = [dict(epoch.parts_ms) for epoch in epochs]
    took_ms = [epoch.took_ms for epoch in epochs]
    read, rows = [epoch.read for epoch in epochs], [epoch.rows for epoch in epochs]
    times = list(_throughput(epochs))
    per_s = [point[1] for point in times], [point[2] for point in times]
    numbers = [epoch.number for epoch in epochs]
    return {
        "readName": facts.read_name,
        "parts": {
            "epochs": numbers,
            "ms": {name: [part.get(name) for part in parts] for name in PARTS},
            "end": end_of(took_ms),
            "cut": cut_text(numbers, took_ms, "ms"),
        }
        if any(parts)
        else None,
        "counts": {
            "x": numbers,
            "in": read,
            "out": rows,
            "ends": [end_of(read), end_of(rows)],
            "cut": _both(cut_text(numbers, read, "in"), cut_text(numbers, rows, "out")),
        },
        "throughput": {
            "x": [point[0] for point in times],
            "in": per_s[0],
            "out": per_s[1],
            "ends": [end_of(per_s[0]), end_of(per_s[1])],
            "cut": "",
        },
    }


def end_of(values: Sequence[float | None]) -> float | None:
    """Return the end of an axis; None: the axis ends with the largest value."""
    known = sorted(value for value in values if value is not None)
    if len(known) < VALUES_MIN:
        return None
    usual = known[-1 - max(1, len(known) // 20)]
    return usual * ROOM if 0 < usual * CUT_AT_TIMES < known[-1] else None


def cut_text(numbers: Sequence[int], values: Sequence[float | None], unit: str) -> str:
    """Name the epochs that an axis cuts off; "": none."""
    end = end_of(values)
    cut = [
        f"epoch {number}: {value:,.0f} {unit}"
        for number, value in zip(numbers, values, strict=True)
        if end is not None and value is not None and value > end
    ]
    return ", ".join(cut)


def _both(*texts: str) -> str:
    return ", ".join(filter(None, texts))


def _throughput(
    epochs: Sequence[EpochFact],
) -> Iterator[tuple[float, float | None, float | None]]:
    """Yield an epoch's time of decision, in s, and the records read and rows put out per s."""
    known = [epoch for epoch in epochs if epoch.decided_ms is not None]
    for before, epoch in pairwise(known):
        took_s = (epoch.decided_ms or 0) / 1000 - (before.decided_ms or 0) / 1000
        if took_s > 0:
            read, rows = epoch.read, epoch.rows
            yield (
                (epoch.decided_ms or 0) / 1000,
                None if read is None else read / took_s,
                None if rows is None else rows / took_s,
            )
