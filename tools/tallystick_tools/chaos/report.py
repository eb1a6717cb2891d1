"""Reports of `tallystick chaos`: as text, as JSON, and as one HTML page with a timeline."""

import json
from collections import Counter
from collections.abc import Iterable, Sized
from dataclasses import asdict
from html import escape
from pathlib import Path

from tallystick_tools.chaos.compare import SHOWN_MAX
from tallystick_tools.chaos.schedule import KINDS
from tallystick_tools.chaos.verify import Verdict

WIDTH, HEIGHT, MARGIN = 960, 260, 40
STYLE = """\
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1.exact { color: #0a6b32 } h1.not { color: #a4161a }
table { border-collapse: collapse } td, th { padding: .2rem .8rem .2rem 0; text-align: left;
vertical-align: top } td.number { text-align: right } code { word-break: break-all }
svg { width: 100%; height: auto; background: #fafafa } .missed { opacity: .35 }
"""


def headline(verdict: Verdict) -> str:
    """Return the result in one sentence."""
    hits = len(verdict.hits)
    disturbed = verdict.disturbed
    planned = len(disturbed.injected)
    if verdict.is_exact:
        return (
            f"EXACT: {len(disturbed.records):,} records of output are as undisturbed, through "
            f"{hits} faults ({planned - hits} had nothing to hit) and {disturbed.starts} starts"
        )
    what = [f"{count:,} {kind}" for kind, count in _kinds_of(verdict).items()]
    if verdict.problems:
        what.append(f"{len(verdict.problems):,} other problem{'s' * (len(verdict.problems) > 1)}")
    return f"NOT EXACT: {', '.join(what)}, through {hits} faults"


def _kinds_of(verdict: Verdict) -> Counter[str]:
    return Counter(difference.kind for difference in verdict.differences)


def as_text(verdict: Verdict) -> str:
    """Return the report for a terminal."""
    lines: list[str] = []
    hit = Counter(injected.fault.kind for injected in verdict.hits)
    if hit:
        lines.append("faults: " + ", ".join(f"{count} {kind}" for kind, count in hit.items()))
    for difference in verdict.differences[:SHOWN_MAX]:
        lines.append(f"  {difference}")
        lines += [f"    at {fault.began_s:.1f} s: {fault.fault.kind}, {fault.hit}"
                  for fault in verdict.around(difference)]  # fmt: skip
    lines += _more(verdict.differences)
    lines += [f"  {problem}" for problem in verdict.problems[:SHOWN_MAX]] + _more(verdict.problems)
    if verdict.explanation:
        lines.append(verdict.explanation)
    if verdict.smallest:
        names = ", ".join(fault.kind for fault in verdict.smallest)
        lines.append(f"The smallest schedule that was found to fail: {names}")
        again = f"--schedule {verdict.smallest_file}"
    else:
        again = verdict.question.again
    return "\n".join([*lines, headline(verdict), f"the same schedule again: {again}"])


def _more(entries: Sized) -> list[str]:
    remaining = len(entries) - SHOWN_MAX
    return [f"  and {remaining:,} more"] if remaining > 0 else []


def write(verdict: Verdict, json_file: Path | None, html_file: Path | None) -> None:
    """Write the report into the files that are named."""
    if json_file is not None:
        json_file.write_text(as_json(verdict))
    if html_file is not None:
        write_html(verdict, html_file)


def as_json(verdict: Verdict) -> str:
    """Return the report for programs; rows are texts."""
    question, expected, disturbed = verdict.question, verdict.expected, verdict.disturbed
    fields = {
        "exact": verdict.is_exact,
        "headline": headline(verdict),
        "command": question.job.command,
        "again": question.again,
        "compare": question.comparison,
        "brokers": question.job.brokers,
        "bootstrap_servers": question.job.servers,
        "transaction_version": question.job.transaction_version,
        "records": {"undisturbed": len(expected.records), "found": len(disturbed.records)},
        "state_keys": {uid: len(keys) for uid, keys in (verdict.compared_state or {}).items()},
        "starts": disturbed.starts,
        "ended_by_itself": disturbed.own_ends,
        "seconds": round(disturbed.seconds, 1),
        "faults": [
            {
                **asdict(injected.fault),
                "began_s": injected.began_s,
                "ended_s": injected.ended_s,
                "hit": injected.hit,
            }
            for injected in disturbed.injected
        ],
        "progress": disturbed.progress,
        "differences": [str(difference) for difference in verdict.differences],
        "problems": verdict.problems,
        "explanation": verdict.explanation,
        "smallest": [asdict(fault) for fault in verdict.smallest],
    }
    return json.dumps(fields, indent=1)


def write_html(verdict: Verdict, path: Path) -> None:
    """Write the report as one self-contained HTML file."""
    question, disturbed = verdict.question, verdict.disturbed
    faults = [
        [f"{injected.began_s:.1f}", injected.fault.kind, injected.hit or "nothing to hit",
         KINDS[injected.fault.kind]] for injected in disturbed.injected
    ]  # fmt: skip
    parts = [
        "<!doctype html><meta charset=utf-8><title>tallystick chaos</title>",
        f"<style>{STYLE}</style>",
        f"<h1 class={'exact' if verdict.is_exact else 'not'}>{escape(headline(verdict))}</h1>",
        f"<p><code>{escape(' '.join(question.job.command))}</code>, "
        f"<code>{escape(question.again)}</code>, "
        f"compared as {question.comparison}, "
        f"{question.job.servers or f'{question.job.brokers} broker(s)'}</p>",
        timeline(verdict),
        f"<p>{escape(verdict.explanation)}</p>",
        _list("Differences", map(str, verdict.differences)),
        _list("Problems", verdict.problems),
        _list("Smallest schedule that fails", (fault.kind for fault in verdict.smallest)),
        "<h2>Faults</h2>" + _table(["second", "fault", "hit", "what it is"], faults),
    ]
    path.write_text("\n".join(parts))


def timeline(verdict: Verdict) -> str:
    """Return an SVG: the input committed as read, over time, and the faults."""
    disturbed = verdict.disturbed
    seconds = max(disturbed.seconds, 1.0)
    total = max((read for _, read in disturbed.progress), default=1)

    def x(at: float) -> float:
        return MARGIN + (WIDTH - 2 * MARGIN) * at / seconds

    def y(read: float) -> float:
        return HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * read / total

    points = [f"{x(0):.1f},{y(0):.1f}"]
    before = 0
    for at, read in disturbed.progress:
        points += [f"{x(at):.1f},{y(before):.1f}", f"{x(at):.1f},{y(read):.1f}"]
        before = read
    marks = []
    for injected in disturbed.injected:
        start, width = x(injected.began_s), max(2.0, x(injected.ended_s) - x(injected.began_s))
        hit = injected.hit or "nothing to hit"
        label = escape(f"{injected.began_s:.1f} s: {injected.fault.kind}, {hit}")
        kind = "" if injected.hit else " class=missed"
        marks.append(
            f"<rect{kind} x={start:.1f} y={MARGIN} width={width:.1f} height={HEIGHT - 2 * MARGIN} "
            f"fill='#d9480f' opacity='.35'><title>{label}</title></rect>"
        )
    ends = f"<text x={MARGIN} y={HEIGHT - 12}>0 s</text>"
    ends += f"<text x={WIDTH - MARGIN} y={HEIGHT - 12} text-anchor=end>{seconds:.0f} s</text>"
    ends += f"<text x={MARGIN} y={MARGIN - 12}>{total:,} records of input committed as read</text>"
    line = f"<polyline points='{' '.join(points)}' fill=none stroke='#1864ab' stroke-width=2 />"
    box = f"viewBox='0 0 {WIDTH} {HEIGHT}'"
    return f"<svg {box} font-size=13>{''.join(marks)}{line}{ends}</svg>"


def _list(title: str, texts: Iterable[str]) -> str:
    items = [f"<li><code>{escape(text)}</code>" for text in texts]
    shown = items[:SHOWN_MAX] + _more(items)
    return f"<h2>{title}</h2><ul>{''.join(shown)}</ul>" if items else ""


def _table(names: list[str], rows: list[list[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) for row in rows)
    return f"<table><tr>{head}{body}</table>"
