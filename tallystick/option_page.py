"""The option tables of pages, made from the code.

python -m tallystick.option_page docs/reading-from-kafka.md
python -m tallystick.option_page docs/writing-exactly-once.md
"""

import sys
from itertools import groupby
from pathlib import Path

from tallystick.option_table import OPTIONS, WRITE_OPTIONS, Option

BEGIN = (
    "<!-- options: made by python -m tallystick.option_page; edit tallystick/option_table.py -->"
)
BEGIN_WRITING = BEGIN.replace("options: made", "options of the sink: made")
END = "<!-- end of options -->"


def tables(declared: tuple[Option, ...] = OPTIONS) -> str:
    """One table per section, in the order in which options are declared."""
    parts = []
    for section, options in groupby(declared, key=lambda option: option.section):
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
    is_of_sink = BEGIN_WRITING in page
    mark, declared = (BEGIN_WRITING, WRITE_OPTIONS) if is_of_sink else (BEGIN, OPTIONS)
    before, begin, rest = page.partition(mark)
    _, end, after = rest.partition(END)
    assert begin, f"the page has no line {mark}"
    assert end, f"the page has no line {END}"
    return f"{before}{mark}\n\n{tables(declared)}\n\n{END}{after}"


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(spliced(file.read_text()))
