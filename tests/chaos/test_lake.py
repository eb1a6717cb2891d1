"""Rows of Delta and Iceberg tables as output: nothing while decided epochs wait."""

import json
from pathlib import Path
from typing import Any

import pytest

from tallystick.epoch.two_phase import RunFacts
from tallystick_tools.chaos.lake import LakeTables
from tests.delta.delta_sinks import COLUMNS, OWNER, opened, place, prepared, rows
from tests.iceberg.iceberg_sinks import NAME, sink_in


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_rows_are_read_once_their_commit_is_over(tmp_path: Path, kind: str) -> None:
    delta, iceberg = (["t"], []) if kind == "delta" else ([], [NAME])
    lake = LakeTables(tmp_path, delta, iceberg)
    assert lake.look() is None, "there is no table"
    settings: dict[str, Any] = {"create": True, "schema": COLUMNS, "commit_every": "1 hour"}
    if kind == "delta":
        sink = opened(tmp_path / "t", **settings)
    else:
        sink = sink_in(tmp_path, **settings).open(OWNER, RunFacts())
    before = lake.look()
    assert before is not None
    sink.commit_together(prepared(sink, place(), rows(0, 3)))
    assert lake.look() is None
    with pytest.raises(TimeoutError, match="wait for a commit"):
        lake.rows()
    sink.close()

    assert lake.look() not in (None, before)
    assert {record.topic for record in lake.rows()} == {f"{kind} {(*delta, *iceberg)[0]}"}
    assert sorted(json.loads(record.value)["n"] for record in lake.rows()) == [0, 1, 2]
