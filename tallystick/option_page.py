"""The option tables of the page "Reading from Kafka", made from the code.

python -m tallystick.option_page docs/reading-from-kafka.md
"""

import sys
from itertools import groupby
from pathlib import Path

from tallystick.option_table import OPTIONS, Option

BEGIN = (
    "<!-- options: made by python -m tallystick.option_page; edit tallystick/option_table.py -->"
)
END = "<!-- end of options -->"


def tables() -> str:
    """One table per section, in the order in which options are declared."""
    parts = []
    for section, options in groupby(OPTIONS, key=lambda option: option.section):
        rows = [_row(option) for option in options]
        head = ["| option | type, unit | default | example |", "| --- | --- | --- | --- |"]
        parts.append("\n".join([f"### {section}", "", *head, *rows]))
    return "\n\n".join(parts)


def _row(option: Option) -> str:
    only = f" Only for a {option.only}." if option.only else ""
    what = f"**`{option.name}`** {option.meaning}{only}"
    return f"| {what} | {option.kind} | {option.default} | `{option.example}` |"


def spliced(page: str) -> str:
    """The page with its tables made anew; what stands outside the marks stays as it is."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin, f"the page has no line {BEGIN}"
    assert end, f"the page has no line {END}"
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}"


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(spliced(file.read_text()))
