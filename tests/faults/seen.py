"""The table of faults and deaths in the docs, from what its test has seen: `seen.json`."""

import json
from pathlib import Path
from typing import Any

SEEN = Path(__file__).with_name("seen.json")
COLUMNS = {
    "doctor": "`tallystick doctor`", "page": "page", "metrics": "metrics", "alerts": "alerts",
    "log": "log of the driver",
}  # fmt: skip
TEXT_MAX = 160


def known() -> dict[str, dict[str, Any]]:
    """Return what was seen of each fault."""
    faults: dict[str, dict[str, Any]] = json.loads(SEEN.read_text()) if SEEN.exists() else {}
    return faults


def page() -> str:
    """The table of faults and deaths: what each tool says of each."""
    lines = [
        "| fault | " + " | ".join(COLUMNS.values()) + " |",
        "| --- " * (len(COLUMNS) + 1) + "|",
    ]
    for name, seen in known().items():
        cells = [_cell(seen, column) for column in COLUMNS]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(seen: dict[str, Any], column: str) -> str:
    value = seen[column]
    texts = [value] if isinstance(value, str) else value
    shown = "<br>".join(_short(text) for text in texts if text)
    if column == "doctor":
        return f"exit {seen['exit_code']}" + (f"<br>{shown}" if shown else ": nothing is wrong")
    return shown or "nothing"


def _short(text: str) -> str:
    """Return a text for a cell: one line, and not the whole of a long one."""
    line = " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
    return line if len(line) <= TEXT_MAX else line[:TEXT_MAX].rsplit(" ", 1)[0] + " …"


def keep(name: str, seen: dict[str, Any]) -> None:
    """Write what was seen of a fault."""
    SEEN.write_text(json.dumps(known() | {name: seen}, indent=1, ensure_ascii=False) + "\n")
