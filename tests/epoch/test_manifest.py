"""What outlives the process reads back exactly, or is refused."""

import json
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tallystick.epoch.manifest import (
    CHECKPOINT,
    EPOCHS_RETAINED,
    EXPIRED_MAX,
    FOLDER,
    KAFKA,
    VERSION,
    Manifest,
    decode,
    expired_manifests,
    manifest_path,
    retained_manifests,
)
from tallystick.epoch.two_phase import Committable
from tallystick.errors import ManifestError
from tallystick.values import ProducedRange, Producer

names = st.text(min_size=1, max_size=12)
counts = st.integers(0, 2**62)


@st.composite
def ranges(draw):
    first = draw(counts)
    last = first + draw(st.integers(0, 1000))
    count = draw(st.integers(1, 2**40))
    return ProducedRange(draw(names), draw(st.integers(0, 10_000)), count, first, last)


manifests = st.builds(
    Manifest,
    checkpoint_id=counts,
    pipeline=names,
    lineage=names,
    sources=st.lists(st.text(max_size=40), max_size=3).map(tuple),
    produced=st.lists(ranges(), max_size=4).map(tuple),
    producer=st.builds(Producer, names, counts, st.integers(0, 2**15 - 1)),
    committables=st.lists(
        st.builds(Committable, names, counts, counts, names, counts, counts, st.text(max_size=40)),
        max_size=3,
    ).map(tuple),
    decided_by=st.sampled_from((KAFKA, CHECKPOINT)),
    base_path=st.one_of(st.just(""), names),
)
EXAMPLE = Manifest(3, "late-flights", "l", ('{"a": 1}',), (), Producer("t", 7, 2))


@given(manifests)
def test_a_manifest_reads_back_as_it_was(manifest):
    assert decode(manifest.encode(), "m") == manifest


@given(manifests, st.data())
def test_a_damaged_manifest_is_refused(manifest, data):
    """Whichever byte of it changes, and wherever it is cut off."""
    good = manifest.encode()
    at = data.draw(st.integers(0, len(good) - 2))  # the last newline may go
    flipped = good[:at] + bytes([good[at] ^ data.draw(st.integers(1, 255))]) + good[at + 1 :]
    for bad in (flipped, good[:at]):
        if bad.rstrip(b"\n") != good.rstrip(b"\n"):
            with pytest.raises(ManifestError, match="checksum"):
                decode(bad, "m")


@given(st.binary(max_size=60))
def test_any_bytes_are_a_manifest_or_a_manifest_error(data):
    with pytest.raises(ManifestError):
        decode(data, "m")


def test_a_newer_format_is_named():
    fields = json.loads(EXAMPLE.encode().splitlines()[0]) | {"version": VERSION + 1}
    line = json.dumps(fields).encode()

    with pytest.raises(ManifestError, match=f"m7: format version {VERSION + 1}.*release"):
        decode(line + b"\n%08x\n" % zlib.crc32(line), "m7")


def test_it_is_one_line_of_json_and_its_checksum():
    line, checksum = EXAMPLE.encode().splitlines()

    assert int(checksum, 16) == zlib.crc32(line)
    assert json.loads(line) == {
        "version": 1,
        "checkpoint_id": 3,
        "pipeline": "late-flights",
        "lineage": "l",
        "sources": ['{"a": 1}'],
        "produced": [],
        "producer": {"transactional_id": "t", "producer_id": 7, "producer_epoch": 2},
        "state": [],
        "origin": None,
        "committables": [],
        "decided_by": "kafka",
        "base_path": "",
    }


@given(st.integers(0, 10**11), st.integers(0, 10**11))
def test_paths_sort_by_epoch(one, other):
    paths = [
        manifest_path(Manifest(n, "p", "l", (), (), Producer("t", 1, 0)), "x") for n in (one, other)
    ]

    assert (paths[0] < paths[1]) == (one < other)
    assert all(path.startswith(f"{FOLDER}/") for path in paths)


def test_two_runs_never_share_a_path():
    assert manifest_path(EXAMPLE, "a") != manifest_path(EXAMPLE, "b")


some_epochs = st.lists(st.integers(0, 200), max_size=40)


def path_of(epoch: int) -> str:
    return f"tallystick/{epoch:012d}-3-ab12.json"


@given(some_epochs, st.integers(0, 200))
def test_every_manifest_is_kept_or_goes_and_the_newest_epochs_are_kept(epochs, committed):
    paths = [path_of(epoch) for epoch in (*epochs, committed)]
    gone, kept = expired_manifests(paths, committed), retained_manifests(paths, committed)

    assert sorted(gone + kept) == sorted(paths)
    assert path_of(committed) in kept
    past = sorted({epoch for epoch in (*epochs, committed) if epoch <= committed})
    newest = past[-EPOCHS_RETAINED:]  # of those that ran: others were perhaps left out
    assert all((path_of(epoch) in kept) == (epoch >= newest[0]) for epoch in epochs)


def test_an_old_checkpoint_is_cleared_up_bit_by_bit():
    paths = [path_of(epoch) for epoch in range(EXPIRED_MAX + 100)]

    assert expired_manifests(paths, 10**6) == paths[:EXPIRED_MAX]
