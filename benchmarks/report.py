"""The report: what `results.jsonl` says of the newest runs, with plots.

    .venv/bin/pip install matplotlib
    .venv/bin/python benchmarks/report.py --since 2026-11-22T17:00

Writes `report/README.md` and its plots, as SVG: medians over the rounds, with the least and the
most of them. It measures nothing itself.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.results import markdown

HERE = Path(__file__).resolve().parent
LATENCY = "latency: "
STARTUP = "startup"
EPOCH_COST = "epoch_cost"
OURS = "ours"
OUR_COLOUR, PEER_COLOUR = "#1f77b4", "#b0b0b0"
PERCENTILES = ("p50_ms", "p90_ms", "p99_ms")
THROUGHPUT = {
    "records_per_s": "records/s, start included",
    "warm_records_per_s": "warm records/s",
    "warm_job_cpu_s_per_million": "warm job CPU s / M",
    "first_commit_s": "first commit s",
    "peak_memory_mib": "peak MiB",
}
Row = Mapping[str, Any]


def main() -> int:
    """Read the results, write tables and plots."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--since", default="", help="date and time of the first run that counts")
    parser.add_argument("--results", type=Path, default=HERE / "results.jsonl")
    parser.add_argument("--output", type=Path, default=HERE / "report")
    arguments = parser.parse_args()
    rows = [json.loads(line) for line in arguments.results.read_text().splitlines()]
    rows = [row for row in rows if row["date"] >= arguments.since]
    if not rows:
        print(f"no run since {arguments.since} in {arguments.results}", file=sys.stderr)
        return 1
    arguments.output.mkdir(parents=True, exist_ok=True)
    parts = [head(rows), *throughput(rows, arguments.output)]
    parts += [*latency(rows, arguments.output), *startup(rows), *epoch_cost(rows)]
    (arguments.output / "README.md").write_text("\n\n".join(parts) + "\n")
    print(arguments.output / "README.md")
    return 0


def head(rows: Sequence[Row]) -> str:
    """Which runs these are: when, on what code and machine."""
    configs = [row["config"] for row in rows]
    commits = sorted({config["commit"] for config in configs})
    machine = configs[-1]
    return (
        "# Report\n\n"
        f"Runs from {rows[0]['date']} to {rows[-1]['date']}; commits {', '.join(commits)}; "
        f"{machine['cores']} cores, {machine['memory_gib']} GiB, Python {machine['python']}. "
        "Medians over the rounds, in brackets the least and the most. "
        "What systems and columns are: [the benchmarks](../README.md); made by `report.py`."
    )


def throughput(rows: Sequence[Row], output: Path) -> Iterable[str]:
    """A table, its ratios and a plot for each job, mode and input."""
    for input_name, rows_of_input in _grouped(
        (row for row in rows if "verdict" in row), _input
    ).items():
        systems = _grouped(rows_of_input, lambda row: row["system"])
        ours = [name for name in systems if name.startswith(OURS)]
        lines = [
            [name, str(len(runs)), *(_spread(_values(runs, column)) for column in THROUGHPUT)]
            for name, runs in systems.items()
        ]
        exact = all(row["verdict"]["exact"] for row in rows_of_input)
        yield f"## {input_name}\n\n" + markdown(["system", "runs", *THROUGHPUT.values()], lines)
        ratios = [
            [
                f"{our} ÷ {peer}",
                *(_ratio(systems[our], systems[peer], column) for column in THROUGHPUT),
            ]
            for our in ours
            for peer in systems
            if peer not in ours
        ]
        if ratios:
            yield markdown(["ratio", *THROUGHPUT.values()], ratios)
        yield "All outputs exact." if exact else "**An output was wrong.**"
        name = (
            "".join(character if character.isalnum() else "-" for character in input_name) + ".svg"
        )
        bars = {name: _values(runs, "warm_records_per_s") for name, runs in systems.items()}
        plot(output / name, f"{input_name}: warm records/s", bars)
        yield f"![warm records/s]({name})"


def latency(rows: Sequence[Row], output: Path) -> Iterable[str]:
    """End-to-end latency at a steady rate."""
    measured = [row for row in rows if row["system"].startswith(LATENCY)]
    if not measured:
        return
    systems = _grouped(measured, lambda row: row["system"].removeprefix(LATENCY))
    columns = {**dict(zip(PERCENTILES, ("p50", "p90", "p99"), strict=True)), "pmax_ms": "most"}
    columns |= {"job_cores": "job cores", "all_cores": "all cores"}
    lines = [
        [name, str(len(runs)), *(_spread(_values(runs, column)) for column in columns)]
        for name, runs in systems.items()
    ]
    rate = measured[-1]["config"]["rate"]
    yield f"## Latency of `count` at {rate:,} records/s, ms"
    yield markdown(["system", "runs", *columns.values()], lines)
    for column in ("p50_ms", "p99_ms"):
        bars = {name: _values(runs, column) for name, runs in systems.items()}
        plot(output / f"latency-{column}.svg", f"latency, {column.replace('_', ' in ')}", bars)
        yield f"![{column}](latency-{column}.svg)"


def startup(rows: Sequence[Row]) -> Iterable[str]:
    """From the start of the process to the first committed record."""
    measured = [row for row in rows if row["system"] == STARTUP]
    if not measured:
        return
    variants = _grouped(measured, lambda row: f"{row['job']}, {row['given']}")
    lines = [
        [name, str(len(runs)), _spread(_values(runs, "first_s")), _spread(_values(runs, "cpu_s"))]
        for name, runs in variants.items()
    ]
    yield "## Process start to first committed record"
    yield markdown(["job, what `start()` is given", "runs", "s", "CPU s"], lines)


def epoch_cost(rows: Sequence[Row]) -> Iterable[str]:
    """What an epoch costs that has next to nothing to do."""
    measured = [row for row in rows if row["system"] == EPOCH_COST]
    if not measured:
        return
    yield "## Epochs with next to nothing to do, stateless, ms"
    for row in measured:
        columns = ["empty, p50", "empty, p90", "10 records, p50", "10 records, p90"]
        yield markdown(
            ["part", *columns], [[part, *milliseconds] for part, milliseconds in row["ms"].items()]
        )


def plot(path: Path, title: str, bars: Mapping[str, Sequence[float]]) -> None:
    """Bars of medians, whiskers from the least to the most."""
    import matplotlib  # only here: the rest of the benchmarks does without

    matplotlib.use("svg")
    from matplotlib import pyplot

    bars = {name: values for name, values in bars.items() if values}
    medians = [statistics.median(values) for values in bars.values()]
    below = [m - min(v) for m, v in zip(medians, bars.values(), strict=True)]
    above = [max(v) - m for m, v in zip(medians, bars.values(), strict=True)]
    colours = [OUR_COLOUR if name.startswith(OURS) else PEER_COLOUR for name in bars]
    figure, axes = pyplot.subplots(figsize=(8, 1.2 + 0.4 * len(bars)), layout="constrained")
    axes.barh(list(bars), medians, xerr=[below, above], color=colours, capsize=3)
    axes.invert_yaxis()
    axes.set_title(title, fontsize=9)
    axes.ticklabel_format(axis="x", style="plain")
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _input(row: Row) -> str:
    config = row["config"]
    name = f"{row['job']}, {row['mode']}, {config['records']:,} records, {config['keys']:,} keys"
    if config.get("input") == "spread":
        name += ", spread input"
    if config.get("pad_bytes"):
        name += f", values {config['pad_bytes']} bytes longer"
    compression = config.get("input_compression", "producer")
    return name if compression == "producer" else f"{name}, input {compression}"


def _grouped(rows: Iterable[Row], key: Any) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def _values(rows: Sequence[Row], name: str) -> list[float]:
    return [row[name] for row in rows if row.get(name) is not None]


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "-"
    median, least, most = statistics.median(values), min(values), max(values)
    if len(values) == 1:
        return _shown(median)
    return f"{_shown(median)} ({_shown(least)} to {_shown(most)})"


def _ratio(ours: Sequence[Row], peer: Sequence[Row], name: str) -> str:
    our, other = _values(ours, name), _values(peer, name)
    return f"{statistics.median(our) / statistics.median(other):.2f}" if our and other else "-"


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


if __name__ == "__main__":
    sys.exit(main())
