"""The page of a process that does not run the pipeline: `tallystick ui`."""

from pathlib import Path

import pytest

from tallystick.checkpoint.newest_run import RUN, newest_run, note_run
from tallystick.ops.ui import rendering
from tallystick.ops.ui.page import CheckpointReader
from tallystick.values import SINK, SOURCE, TASKS, GraphNode
from tests.checkpoint_on_disk import Job

GRAPH = (
    (GraphNode(SOURCE, "orders", ("orders",)),),
    (GraphNode(TASKS, "read", ("clean",)),),
    (GraphNode(TASKS, "counts", ("by user", "<b>count</b>")),),
    (GraphNode(SINK, "sink", ("totals",)),),
)


def test_the_job_is_shown_as_its_newest_run_has_noted_it(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.run()
    assert CheckpointReader(str(tmp_path), None).read().graph == ()
    note_run(job.storage, "r", GRAPH)
    note_run(job.storage)  # a recovery knows nothing of the steps
    facts = CheckpointReader(str(tmp_path), None).read()
    shown = [[(node.kind, node.name, node.texts) for node in layer] for layer in facts.graph]
    assert shown == [[(node.kind, node.name, node.texts) for node in layer] for layer in GRAPH]
    assert {node.in_per_s for layer in facts.graph for node in layer} == {None}
    text = rendering.sections(facts)["job"]
    assert "<h3>counts</h3>" in text
    assert "&lt;b&gt;count&lt;/b&gt;" in text
    assert "rows/s" not in text


@pytest.mark.parametrize(
    "graph", ["7", "[7]", '[[{"kind": "source"}]]', '[[{"kind": 1, "name": 2, "texts": 3}]]']
)
def test_a_damaged_note_says_nothing(tmp_path: Path, graph: str) -> None:
    job = Job(tmp_path)
    job.run()
    note = f'{{"host": "h", "pid": 1, "started": "s", "graph": {graph}}}'
    job.storage.put(RUN, note.encode())
    assert newest_run(job.storage) is None
    assert CheckpointReader(str(tmp_path), None).read().graph == ()


def test_a_note_of_an_earlier_release_is_read(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.storage.put(RUN, b'{"host": "h", "pid": 1, "started": "s", "run": "r"}')
    run = newest_run(job.storage)
    assert run is not None
    assert (run.run, run.graph) == ("r", ())
