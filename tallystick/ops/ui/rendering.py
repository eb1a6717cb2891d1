"""The page's HTML: a frame that stays, and sections, each sent again after a change."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from tallystick.ops.cli_show import printable, size_text, time_text
from tallystick.ops.ui.facts import PageFacts
from tallystick.state.overlay import FINAL_WATERMARK_MS, is_final
from tallystick.values import Severity

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
HERE = Path(__file__).parent
SECTIONS = ("summary", "findings", "epochs", "sources", "state", "transactions", "errors")
"""Each is a template, and an element of the page."""
SHOWN_MAX = 50
"""At most this many rows of a table; the JSON at `/facts.json` has them all."""


def page(facts: PageFacts) -> str:
    """Return the whole page."""
    return (
        _environment()
        .get_template("page.html")
        .render(facts=facts, sections=sections(facts), title=facts.name or "Tallystick")
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
    environment.filters |= {"count": _count, "size": size_text, "duration": time_text, "utc": _utc}
    environment.tests["final"] = is_final
    environment.globals |= {"worst": _worst, "Severity": Severity}
    return environment


def _shown(value: Any) -> Any:
    """Return a text without control characters: a name may come from a file, or from Kafka."""
    return printable(value) if type(value) is str else value


def _count(value: float | None) -> str:
    """Write a number with its thousands apart; None as words."""
    return "not known" if value is None else f"{value:,.0f}"


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
