"""Spark's log is mended where it is damaged, and left alone where it only looks so."""

from pathlib import Path

import pytest

from tallystick.checkpoint.manifest import Manifest, manifest_path
from tallystick.sink.transaction import Producer
from tallystick.spark_log import COMMITS, METADATA, OFFSETS, SparkLog, parse_entry
from tallystick.storage import FileStorage


def files_of(storage: FileStorage) -> dict[str, bytes | None]:
    paths = [*storage.names(OFFSETS), *storage.names(COMMITS)]
    return {path: storage.get(path) for path in paths}


@pytest.mark.parametrize("first", [0, 201], ids=["all are there", "Spark has removed the oldest"])
def test_a_whole_log_is_left_alone(tmp_path: Path, first: int) -> None:
    """All micro-batches but one were left out by a user's function; a source names odd paths."""
    storage = FileStorage(str(tmp_path))
    odd = "".join(map(chr, (0x2028, 0x85, 0x1C, 0x0B)))
    source = f'{{"path":"{odd[:2]}"}}'
    committed = Manifest(0, "p", "l", (source,), (), Producer("t", 1, 1))
    storage.put(manifest_path(committed, "n"), committed.encode())
    for epoch in range(first, first + 3):
        storage.put(f"{OFFSETS}/{epoch}", f"v1\n{{}}\n{source}\n-{odd}".encode())
        storage.put(f"{COMMITS}/{epoch}", b"v1\n{}")
    before = files_of(storage)
    SparkLog(storage).mend()

    assert files_of(storage) == before
    assert SparkLog(storage).batch(first).sources == (source, f"-{odd}")


def test_lines_end_as_spark_reads_them() -> None:
    for end in ("\n", "\r\n", "\r"):
        found = parse_entry(end.join(["v1", "{}", "-", "7", ""]).encode())
        assert found is not None
        assert found.sources == ("-", "7")


@pytest.mark.parametrize("remains", [b"", bytes(45)])
def test_metadata_that_a_power_cut_emptied_goes_while_nothing_is_decided(
    tmp_path: Path, remains: bytes
) -> None:
    storage = FileStorage(str(tmp_path))
    storage.put(METADATA, remains)
    SparkLog(storage).mend()

    assert storage.get(METADATA) is None
