"""Results: one line of JSON per run, and the table that compares systems."""

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from .measure import Result
from .systems import System

OURS = "ours"
"""How the names of our systems begin."""
MISSING = "-"


def append(path: Path, result: Result, *, config: Mapping[str, object]) -> None:
    """Add one run of one system to the results file: every figure, and the verifier's verdict."""
    system = result.system
    figures = {name: _rounded(value) for name, value in asdict(result.figures).items()}
    row = {
        "job": system.job,
        "mode": system.mode,
        **figures,
        "done_records": result.done_records,
        "peak_memory_mib": round(result.peak_memory_mib),
        "verdict": asdict(result.verdict),
    }
    run = {"records": result.input.records, **config}
    append_row(path, system.name, row, config={**system.config, **run})


def append_row(
    path: Path, name: str, row: Mapping[str, object], *, config: Mapping[str, object]
) -> None:
    """Add one line to the results file: date, what was run on what, and what came of it."""
    date = datetime.now(UTC).isoformat(timespec="seconds")
    with path.open("a") as file:
        file.write(json.dumps({"date": date, "system": name, "config": dict(config), **row}) + "\n")


def environment(directory: Path) -> dict[str, object]:
    """What a result depends on and does not show: the machine, and the state of our code."""
    return {
        "commit": _commit(directory),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
    }


def table(results: Sequence[Result]) -> str:
    """The systems of one job and mode side by side, in Markdown: medians over the rounds."""
    return markdown(HEADINGS, [_row(system, _of(system, results)) for system in _systems(results)])


def ratios(results: Sequence[Result]) -> str:
    """Ours divided by each peer, in Markdown; empty when one of the two was not run."""
    systems = _systems(results)
    ours = [system for system in systems if system.name.startswith(OURS)]
    rows = []
    for our_system in ours:
        for peer_system in [system for system in systems if system not in ours]:
            our, peer = (
                _medians(_of(system_name, results)) for system_name in (our_system, peer_system)
            )
            named = f"{our_system.name} / {peer_system.name}"
            rows.append([named, *(_ratio(our[name], peer[name]) for name in COMPARED)])
    return markdown(["ratio", *COMPARED.values()], rows) if rows else ""


def by_job(results: Sequence[Result]) -> str:
    """A row per job that ours and a peer have run, in Markdown: warm rates, and what they cost."""
    shown = {"warm_records_per_s": 0, "warm_job_cpu_s_per_million": 1, "first_commit_s": 1}
    headings = ["query", "ours / peer"]
    headings += [
        f"{COMPARED[name]}: {side}" for name in shown for side in ("ours", "peer", "ratio")
    ]
    rows = []
    for job in dict.fromkeys(result.system.job for result in results):
        of_job = [result for result in results if result.system.job == job]
        is_ours = {system.name: system.name.startswith(OURS) for system in _systems(of_job)}
        if sorted(is_ours.values()) != [False, True]:
            continue
        named = sorted(is_ours, key=is_ours.__getitem__, reverse=True)
        our, peer = (_medians([r for r in of_job if r.system.name == name]) for name in named)
        row = [job, " / ".join(named)]
        for name, digits in shown.items():
            row += [_shown(our[name], digits), _shown(peer[name], digits)]
            row += [_ratio(our[name], peer[name])]
        rows.append(row)
    return markdown(headings, rows) if rows else ""


def _systems(results: Sequence[Result]) -> list[System]:
    return list({result.system.name: result.system for result in results}.values())


def _of(system: System, results: Sequence[Result]) -> list[Result]:
    return [result for result in results if result.system is system]


HEADINGS = [
    *("system", "guarantee", "runs", "records/s", "warm records/s", "job CPU s / M"),
    *("warm job CPU s / M", "broker CPU s / M", "peak MiB", "first commit s", "other CPU s"),
    "output",
]
COMPARED = {
    "records_per_s": "records/s",
    "warm_records_per_s": "warm records/s",
    "job_cpu_s_per_million": "job CPU s / M",
    "warm_job_cpu_s_per_million": "warm job CPU s / M",
    "peak_memory_mib": "peak MiB",
    "first_commit_s": "first commit s",
}


def _row(system: System, results: Sequence[Result]) -> list[str]:
    medians = _medians(results)
    return [
        system.name,
        system.guarantee,
        str(len(results)),
        _shown(medians["records_per_s"], 0),
        _shown(medians["warm_records_per_s"], 0),
        _shown(medians["job_cpu_s_per_million"], 1),
        _shown(medians["warm_job_cpu_s_per_million"], 1),
        _shown(medians["broker_cpu_s_per_million"], 2),
        _shown(medians["peak_memory_mib"], 0),
        _shown(medians["first_commit_s"], 1),
        _shown(medians["other_cpu_s"], 1),
        _judged(results),
    ]


def _judged(results: Sequence[Result]) -> str:
    """In one word; a run that was cut off says how far it came."""
    if not all(result.verdict.exact for result in results):
        return "WRONG"
    least = min(results, key=lambda result: result.done_records / result.input.records)
    if least.complete:
        return "exact"
    return f"exact, cut off at {least.done_records:,} of {least.input.records:,}"


def _medians(results: Sequence[Result]) -> dict[str, float | None]:
    """The median of each figure; None where no run has it."""
    values: dict[str, list[float]] = {}
    for result in results:
        figures = {**asdict(result.figures), "peak_memory_mib": result.peak_memory_mib}
        for name, value in figures.items():
            values.setdefault(name, []).extend([] if value is None else [value])
    return {name: statistics.median(series) if series else None for name, series in values.items()}


def _ratio(ours: float | None, peer: float | None) -> str:
    return MISSING if ours is None or not peer else f"{ours / peer:.2f}"


def _shown(value: float | None, digits: int) -> str:
    return MISSING if value is None else f"{value:,.{digits}f}"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _commit(directory: Path) -> str:
    """The checked-out commit, marked when files differ from it."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude", "*"],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "unknown"
