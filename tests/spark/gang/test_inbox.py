"""Frames that wait in a member: their order, their memory, and how the wait for them ends."""

import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tallystick.spark.gang.inbox import EpochCancelledError, Inbox
from tallystick.tasks.frames import Frame

WAIT_S = 30.0
STAGE = 1


def frame(source: int, sequence: int, data: bytes = b"", target: int = 0) -> Frame:
    return Frame(target, source, sequence, "topic", 3, len(data), data, 17)


def taken(inbox: Inbox, run: int, source_count: int, target: int = 0) -> list[Frame]:
    return list(inbox.frames(run, STAGE, target, source_count))


def in_thread(do: Any, *given: object) -> Future[Any]:
    pool = ThreadPoolExecutor(1)
    future = pool.submit(do, *given)
    pool.shutdown(wait=False)
    return future


sent = st.lists(  # by source: the sizes of its frames, and the target of each
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 2)), max_size=8), min_size=1, max_size=4
)


@settings(deadline=None)
@given(sent, st.integers(0, 120), st.randoms())
def test_frames_come_by_source_and_sequence_however_they_arrive_and_wherever_they_wait(
    sent: list[list[tuple[int, int]]], held_bytes_max: int, chance: Any
) -> None:
    """What one source sends arrives in its order; how sources mix is up to chance."""
    inbox = Inbox(held_bytes_max)
    inbox.begin(1)
    frames = [
        [
            frame(source, at, bytes([source, at]) * size, target)
            for at, (size, target) in enumerate(own)
        ]
        for source, own in enumerate(sent)
    ]
    waiting = [list(own) for own in frames]
    while remaining := [own for own in waiting if own]:
        inbox.put(1, STAGE, chance.choice(remaining).pop(0))
        assert inbox._held_bytes <= held_bytes_max
    for source in chance.sample(range(len(sent)), len(sent)):
        inbox.end(1, STAGE, source)

    for target in range(3):
        expected = [
            sent_frame for own in frames for sent_frame in own if sent_frame.target == target
        ]
        assert taken(inbox, 1, len(sent), target) == expected
    assert inbox._held_bytes == 0
    inbox.begin(2)


@settings(deadline=None)
@given(sent, st.integers(0, 120), st.randoms())
def test_frames_as_they_arrive_keep_the_order_of_each_source(
    sent: list[list[tuple[int, int]]], held_bytes_max: int, chance: Any
) -> None:
    inbox = Inbox(held_bytes_max)
    inbox.begin(1)
    waiting = [
        [frame(source, at, bytes([source, at]) * size) for at, (size, _) in enumerate(own)]
        for source, own in enumerate(sent)
    ]
    expected = [list(own) for own in waiting]
    taken_frames: list[Frame] = []
    frames = inbox.frames(1, STAGE, 0, len(sent), by_source=False)
    while remaining := [own for own in waiting if own]:
        inbox.put(1, STAGE, chance.choice(remaining).pop(0))
        if chance.random() < 0.5:
            taken_frames.append(next(frames))  # whoever else has not ended
    for source in chance.sample(range(len(sent)), len(sent)):
        inbox.end(1, STAGE, source)
    taken_frames += frames

    for source, own in enumerate(expected):
        assert [sent_frame for sent_frame in taken_frames if sent_frame.source == source] == own
    assert len(taken_frames) == sum(map(len, expected))
    assert inbox._held_bytes == 0
    inbox.begin(2)


def test_what_does_not_fit_waits_in_a_file_which_the_next_epoch_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", f"{tmp_path},/nowhere")
    inbox = Inbox(held_bytes_max=1000)
    before = files(tmp_path)
    inbox.begin(1)
    frames = [frame(0, at, os.urandom(300)) for at in range(40)]
    for sent_frame in frames:
        inbox.put(1, STAGE, sent_frame)
        assert inbox._held_bytes <= 1000
    (descriptor,) = files(tmp_path) - before
    assert os.fstat(descriptor).st_size == (40 - 3) * 300
    assert os.fstat(descriptor).st_nlink == 0, "nobody has to remove it"
    inbox.end(1, STAGE, 0)
    assert taken(inbox, 1, 1) == frames
    inbox.begin(2)
    assert files(tmp_path) == before


def test_a_frame_larger_than_all_the_memory_arrives() -> None:
    inbox = Inbox(held_bytes_max=10)
    inbox.begin(1)
    big = frame(0, 0, os.urandom(3 << 20))
    inbox.put(1, STAGE, big)
    inbox.end(1, STAGE, 0)
    assert inbox._held_bytes == 0
    assert taken(inbox, 1, 1) == [big]


def test_memory_is_free_again_for_frames_that_come_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames in memory after frames in the file keep their order."""
    inbox = Inbox(held_bytes_max=100)
    inbox.begin(1)
    for at, size in enumerate((80, 50, 20, 60)):
        inbox.put(1, STAGE, frame(0, at, bytes([at]) * size))
    assert inbox._held_bytes == 100
    frames = inbox.frames(1, STAGE, 0, 1)
    assert next(frames).sequence == 0
    assert inbox._held_bytes == 20
    inbox.put(1, STAGE, frame(0, 4, bytes([4]) * 70))
    assert inbox._held_bytes == 90
    inbox.end(1, STAGE, 0)
    assert [(sent_frame.sequence, set(sent_frame.data)) for sent_frame in frames] == [
        (n, {n}) for n in (1, 2, 3, 4)
    ]


def test_frames_of_the_next_epoch_may_come_first_and_those_of_earlier_ones_are_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path))
    inbox = Inbox(held_bytes_max=50)
    inbox.begin(1)
    for run in (1, 2):
        for at in range(4):
            inbox.put(run, STAGE, frame(0, at, bytes([run]) * 20))
        inbox.end(run, STAGE, 0)
    assert len(files(tmp_path)) == 2
    inbox.begin(2)
    assert len(files(tmp_path)) == 1
    assert inbox._held_bytes == 0, "all that is left lies in the file"
    inbox.put(1, STAGE, frame(0, 4, b"too late"))
    assert inbox._held_bytes == 0
    assert [sent_frame.data for sent_frame in taken(inbox, 2, 1)] == [bytes([2]) * 20] * 4
    inbox.begin(3)
    assert files(tmp_path) == set()


def test_who_waits_gets_frames_as_they_come() -> None:
    inbox = Inbox()
    inbox.begin(1)
    waiting = in_thread(taken, inbox, 1, 2)
    for source in (1, 0):
        inbox.put(1, STAGE, frame(source, 0, b"x"))
        time.sleep(0.05)
        assert not waiting.done()
        inbox.end(1, STAGE, source)
    assert [sent_frame.source for sent_frame in waiting.result(WAIT_S)] == [0, 1]


def test_a_cancelled_epoch_ends_the_wait_and_the_next_one_is_not_cancelled() -> None:
    inbox = Inbox()
    inbox.begin(1)
    waiting = in_thread(taken, inbox, 1, 1)
    time.sleep(0.05)
    inbox.cancel(1)
    with pytest.raises(EpochCancelledError):
        waiting.result(WAIT_S)
    with pytest.raises(EpochCancelledError):
        taken(inbox, 1, 1)
    inbox.begin(2)
    inbox.end(2, STAGE, 0)
    assert taken(inbox, 2, 1) == []


def test_a_lost_peer_ends_every_wait_with_what_became_of_it() -> None:
    inbox = Inbox()
    inbox.begin(1)
    waiting = [in_thread(taken, inbox, 1, 1, target) for target in (0, 1)]
    time.sleep(0.05)
    inbox.fail(OSError("no room on the disk"))
    inbox.fail(OSError("whatever follows from it"))
    for future in waiting:
        with pytest.raises(OSError, match="no room"):
            future.result(WAIT_S)


def files(folder: Path) -> set[int]:
    """The descriptors of this process whose files are in a folder, or were."""
    numbers = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith(f"{folder}/"):
                numbers.add(int(name))
        except OSError:
            continue
    return numbers
