"""Savepoints and checkpoints from somebody else: nothing but them is touched.

The checksum of each file is right: it proves that the file is whole, not who wrote it.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from rich.console import Console

from tallystick.checkpoint.collection import Collection
from tallystick.checkpoint.folder import CheckpointFolder
from tallystick.checkpoint.newest import newest_committed
from tallystick.checkpoint.state_files import read_entries
from tallystick.epoch import manifest as m
from tallystick.epoch import savepoint as s
from tallystick.epoch.manifest import seal
from tallystick.errors import ManifestError, OptionError, TallystickError
from tallystick.ops import cli_show, savepoints
from tallystick.ops.inspection import inspect
from tallystick.ops.savepoints import migrate
from tallystick.storage.file_storage import FileStorage
from tests.checkpoint_on_disk import ALL, Job

GIVEN = ("copy", "checkpoint")
"""Folders that a user names; each has a file that somebody else has written."""
WORDS = (
    *("..", ".", "", "home", "precious.txt", "keyed-state", "counts", "offsets", "2", "a.json"),
    *(
        "%2e%2e",
        "%2F",
        "\\",
        "\0",
        "\n",
        "\x1b[2J",
        "[red]",
        "?region=x",
        "ftp:",
        "file:",
        "{base}",
    ),
    *("/{base}/home", "file://{base}/home", "file://{base}/home/keyed-state/counts/{state}"),
    *("file://{base}/copy/../home/keyed-state/counts/{state}", "{base}/home/keyed-state"),
)


class World:
    """A folder of somebody's with all kinds of files, and beside it what is given to a command."""

    def __init__(self, base: Path) -> None:
        self.base = base
        job = Job(base / "checkpoint")
        job.run(3)
        savepoints.create(job.storage, self.at("copy"))
        home = base / "home"
        shutil.copytree(base / "checkpoint", home)
        (home / "precious.txt").write_text("mine")
        (home / "keyed-state" / "precious.txt").write_text("mine")
        self.state_name = Path(job.state.files[0].path).name
        self.before = self.outside()

    def at(self, name: str) -> FileStorage:
        return FileStorage(str(self.base / name))

    def outside(self) -> dict[str, str]:
        """All that no command was given: by path, the hash of its content."""
        return {
            str(path): hashlib.blake2b(path.read_bytes()).hexdigest() if path.is_file() else ""
            for path in self.base.rglob("*")
            if path.relative_to(self.base).parts[0] not in (*GIVEN, "new", "scratch")
        }

    def edited_file(self, name: str) -> Path:
        """The file in a given folder that was written by somebody else."""
        folder = self.base / name
        if name == "checkpoint":
            return max((folder / m.FOLDER).glob("*.json"))
        return folder / s.FILE

    def write(self, name: str, edit: Callable[[Any], Any]) -> None:
        """Change what the file says, under a checksum that is right."""
        path = self.edited_file(name)
        fields = json.loads(path.read_bytes().splitlines()[0])
        fields = edit(fields)
        path.write_bytes(seal(fields.pop("version", "none"), fields))


def commands(world: World, name: str) -> Iterator[Callable[[], object]]:
    """All that a user may do with what is given."""
    there, out = world.at(name), Console(file=StringIO())
    (world.base / "scratch").mkdir(exist_ok=True)

    def new() -> FileStorage:
        number = len(list((world.base / "new").glob("*"))) if (world.base / "new").exists() else 0
        return world.at(f"new/{number}")

    def shown() -> None:
        for where, saved in savepoints.find(str(world.base / name)):
            if not isinstance(saved, ManifestError):
                cli_show.show_savepoints([cli_show.savepoint_json(where, saved)], out)

    def read() -> None:
        manifest = savepoints.read(there).manifest if name != "checkpoint" else committed()
        for step in manifest.state:
            read_entries(step, ALL, there)

    def committed() -> m.Manifest:
        return newest_committed(there).manifest

    yield shown
    yield read
    if name == "checkpoint":
        yield lambda: cli_show.show_report(inspect(there, verify=True), out)
        yield lambda: savepoints.create(there, new(), pause_s=0)
        yield lambda: Collection(CheckpointFolder(there)).go_on(committed())
        return
    yield lambda: savepoints.restore(there, new())
    yield lambda: migrate(there, new(), {"counts": 7}, world.base / "scratch")
    yield lambda: savepoints.delete(there)


def run_all(world: World, name: str) -> list[Exception]:
    """What the commands raised: errors of ours, and none of them did anything elsewhere."""
    errors = []
    for command in commands(world, name):
        try:
            command()
        except TallystickError as error:
            errors.append(error)
        assert world.outside() == world.before
    return errors


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("foreign"))


@pytest.fixture
def world(template: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """In its place, since whole URIs are in its files; durability is not what it is about."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.chdir(template.base / "home")
    with kept(template):
        yield template


class kept:  # noqa: N801  used as a function
    """Put everything back at the end."""

    def __init__(self, world: World) -> None:
        self.world, self.copy = world, Path(tempfile.mkdtemp()) / "copy"

    def __enter__(self) -> None:
        shutil.copytree(self.world.base, self.copy)

    def __exit__(self, *_: object) -> None:
        for folder in (*GIVEN, "new", "scratch"):
            shutil.rmtree(self.world.base / folder, ignore_errors=True)
            if (self.copy / folder).exists():
                shutil.copytree(self.copy / folder, self.world.base / folder)
        shutil.rmtree(self.copy.parent)


def places_of(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a text stands, or a name; the last part of a name's place is None."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield (*path, key, None)
            yield from places_of(value, (*path, key))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from places_of(value, (*path, index))
    elif isinstance(node, str):
        yield path


def put_at(node: Any, path: tuple[Any, ...], text: str) -> None:
    *way, last = path if path[-1] is not None else path[:-1]
    for key in way:
        node = node[key]
    if path[-1] is None:
        node[text] = node.pop(last)
    else:
        node[last] = text


def replaced(tree: Any, old: str, new: str) -> Any:
    """The same text everywhere, so that the file agrees with itself."""
    return json.loads(json.dumps(tree).replace(json.dumps(old)[1:-1], json.dumps(new)[1:-1]))


TEXTS = st.lists(st.sampled_from(WORDS), max_size=6).map("/".join) | st.text(max_size=12)


@settings(max_examples=60, deadline=None, phases=[Phase.generate])
@given(data=st.data(), name=st.sampled_from(GIVEN))
def test_whatever_a_file_says_nothing_else_is_changed(template, data, name):
    """Any text of it, or the same text everywhere; each command ends, or with an error of ours."""
    world, real = template, FileStorage._place
    reached: list[Path] = []

    def place(self: FileStorage, path: str) -> Any:
        resolved = real(self, path)
        reached.append(Path(os.path.normpath(resolved)))
        return resolved

    def edit(fields: Any) -> Any:
        for _ in range(data.draw(st.integers(1, 3))):
            text = data.draw(TEXTS)
            text = text.replace("{base}", str(world.base)).replace("{state}", world.state_name)
            if data.draw(st.booleans()):
                put_at(
                    fields, data.draw(st.sampled_from(sorted(places_of(fields), key=repr))), text
                )
            else:
                fields = replaced(fields, data.draw(st.sampled_from(common)), text)
        return fields

    checkpoint = (world.base / "checkpoint").as_uri()
    common = [checkpoint, "counts", "keyed-state", "offsets", f"{checkpoint}/keyed-state/counts"]
    with kept(world), pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        patch.chdir(world.base / "home")
        world.write(name, edit)
        patch.setattr(FileStorage, "_place", place)
        run_all(world, name)
    for path in reached:
        assert path.is_relative_to(world.base), path
        assert not path.is_relative_to(world.base / "home"), path


def test_without_edits_every_command_does_its_work(world):
    """Else the test above would show nothing."""
    for name in GIVEN:
        assert run_all(world, name) == []


PATHS = (
    "{home}/precious.txt",
    "../home/precious.txt",
    "keyed-state/counts/../../../home/precious.txt",
)
PATHS += (
    "file://{home}/precious.txt",
    "keyed-state/../home/precious.txt",
    "",
    "keyed-state/counts/",
)
PATHS += ("keyed-state/counts/a\0", "keyed-state/counts/..", "keyed-state/counts/a\\..\\b")
PATHS += ("keyed-state/counts/%2e%2e/a", "file://{home}/%2E%2e/keyed-state/counts/a")
PATHS += ("file://{home}/keyed-state/counts/{state}", "/keyed-state/counts/{state}")
PATHS += ("keyed-state/other/{state}", "keyed-state/counts/{state}\n")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", GIVEN)
def test_a_file_of_state_is_nothing_but_that(world, name, path):
    path = path.replace("{home}", str(world.base / "home")).replace("{state}", world.state_name)

    def edit(fields):
        step = (fields["state"] if "state" in fields else fields["manifest"]["state"])[0]
        step["files"][0]["path"] = path
        return fields

    world.write(name, edit)
    errors = run_all(world, name)
    assert any(repr(path) in str(error) or f"{path} is a file of" in str(error) for error in errors)
    assert all(isinstance(error, ManifestError | OptionError) for error in errors)


@pytest.mark.parametrize("uid", ["../../home", "..", "", "a/b", "/home", ".ssh", "a\n", "x" * 101])
@pytest.mark.parametrize("name", GIVEN)
def test_a_uid_is_one_plain_name(world, name, uid):
    def edit(fields):
        (fields["state"] if "state" in fields else fields["manifest"]["state"])[0]["uid"] = uid
        return fields

    world.write(name, edit)
    assert any("expected one plain name" in str(error) for error in run_all(world, name))


@pytest.mark.parametrize(
    "path",
    [
        *("{home}/.bashrc", "offsets/../../home/.profile", "offsets/3", "metadata", "commits/x"),
        *("tallystick/000000000009-1-a.json", "sources/0/../../../home/a", "sources/0/a\n", "a\0"),
    ],
)
def test_of_sparks_log_a_savepoint_has_only_what_its_epoch_needs(world, path):
    def edit(fields):
        fields["spark"][path.replace("{home}", str(world.base / "home"))] = "echo owned"
        return fields

    world.write("copy", edit)
    with pytest.raises(ManifestError, match="Spark's log"):
        savepoints.restore(world.at("copy"), world.at("new/0"))
    run_all(world, "copy")
    assert not (world.base / "new").exists()


def test_a_savepoint_without_sparks_log_is_none(world):
    """Spark would begin at epoch 0, with positions of nothing."""

    def edit(fields):
        del fields["spark"]["commits/2"]
        return fields

    world.write("copy", edit)
    with pytest.raises(ManifestError, match="Spark's log"):
        savepoints.restore(world.at("copy"), world.at("new/0"))


@pytest.mark.parametrize(
    "edit",
    [
        {"producer": {"transactional_id": "t", "producer_id": 1, "producer_epoch": "../../x"}},
        {"checkpoint_id": 2.0},
        {"checkpoint_id": -2},
        {"producer": {"transactional_id": "t", "producer_id": 1, "producer_epoch": -7}},
        {"sources": [{}]},
        {"state": 7},
        {"strange": 7},
    ],
)
def test_what_no_manifest_says_is_an_error_that_names_the_file(world, edit):
    def edited(fields):
        where = fields.get("manifest", fields)
        where.update(edit)
        return fields

    if "strange" in edit:  # what a newer release may add to a manifest has a version of its own
        world.write("copy", lambda fields: fields | edit)
        names = ["copy"]
    else:
        names = ["copy", "checkpoint"]
        for name in names:
            world.write(name, edited)
    for name in names:
        errors = run_all(world, name)
        file_name = str(world.edited_file("checkpoint").name if name == "checkpoint" else s.FILE)
        assert any(
            file_name in str(error) and "no release writes" in str(error) for error in errors
        )


@pytest.mark.parametrize(
    "edit",
    [
        {"files": [{"last": 200}]},
        {"trail": [["x"]]},
        {"trail": [-5, "x"]},
        {"trail": [5, "x", 0, "y"]},
        {"watermark_ms": "late"},
        {"partition_times": [["orders", 0, "late", 7]]},
        {"key_schema": 5},
        {"next_id": 1.0},
        {"fields": [{"name": "a", "state_id": "b", "kind": "value",
                     "key_schema": "", "value_schema": ""}]},
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", GIVEN)
def test_state_that_no_task_could_use_is_refused_by_the_name_of_its_file(world, name, edit):
    """Later it would be an error of Python's in the middle of a start."""

    def edited(fields):
        step = fields.get("manifest", fields)["state"][0]
        for key, value in edit.items():
            if key == "files":
                step[key][0].update(value[0])
            else:
                step[key] = value
        return fields

    world.write(name, edited)
    errors = run_all(world, name)
    assert any("no release writes what it says" in str(error) for error in errors)


@pytest.mark.parametrize("edit", [{"trail": []}, {"files": "twice"}, {"state": "twice"}])
def test_state_that_would_be_left_out_or_lie_in_one_place_with_other_state_is_refused(world, edit):
    def edited(fields):
        state = fields["manifest"]["state"]
        if "state" in edit:
            state.append(state[0])
        elif "files" in edit:
            state[0]["files"].append(state[0]["files"][0])
        else:
            state[0] |= edit
        return fields

    world.write("copy", edited)
    with pytest.raises(ManifestError, match=r"no version of them|with 3 names|expected each once"):
        savepoints.restore(world.at("copy"), world.at("new/0"))


def test_a_manifest_under_the_name_of_another_epoch_is_not_taken_for_it(world):
    """Its positions and its state are not those of Spark's log."""
    folder = world.base / "checkpoint" / m.FOLDER
    first, *_, last = sorted(folder.glob("*.json"))
    last.write_bytes(first.read_bytes())

    with pytest.raises(ManifestError, match="is that of epoch 0: it was renamed"):
        savepoints.create(world.at("checkpoint"), world.at("new/0"))


@pytest.mark.parametrize("link", ["keyed-state", "keyed-state/counts"])
def test_links_in_a_savepoint_lead_nowhere(world, link):
    """It was unpacked from an archive: its folders may be links to those of a checkpoint."""
    given = world.base / "copy" / link
    shutil.rmtree(given, ignore_errors=True)
    given.symlink_to(world.base / "home" / link)
    world.before = world.outside()

    errors = run_all(world, "copy")

    assert any("is a symbolic link" in str(error) for error in errors)


@pytest.mark.parametrize("name", ["1-report.pdf", "1", "000000000001-0-a.snapshot.txt"])
def test_what_somebody_put_beside_the_state_is_not_collected(world, name):
    there = world.at("checkpoint")
    theirs = world.base / "checkpoint" / "keyed-state" / "counts" / name
    theirs.write_text("theirs")
    orphan = theirs.with_name("000000000001-0-orphan-merged.changelog")
    orphan.write_text("left by an attempt")

    Collection(CheckpointFolder(there)).go_on(newest_committed(there).manifest)

    assert not orphan.exists()
    assert theirs.read_text() == "theirs"


def test_what_a_file_says_is_shown_and_not_obeyed(world):
    """Neither by the terminal nor as markup of a table."""

    def edit(fields):
        fields["name"] = "\x1b]0;owned\x07[link=x]monday"
        return fields

    world.write("copy", edit)
    out = Console(file=StringIO(), width=300)
    savepoint_fields = cli_show.savepoint_json("x", savepoints.read(world.at("copy")))
    cli_show.show_savepoints([savepoint_fields], out)

    shown = out.file.getvalue()
    assert "\x1b" not in shown
    assert "\\x1b]0;owned\\x07[link=x]monday" in shown


def test_a_checkpoint_whose_source_keeps_strange_files_is_not_saved(world):
    """Left out, they would be missing from what is restored."""
    there = world.at("checkpoint")
    there.put("sources/0/0", b"kept")
    there.put("sources/0/a b", b"kept too")

    with pytest.raises(OptionError, match=r"has 'sources/0/a b'"):
        savepoints.create(there, world.at("new/0"))
    there.delete("sources/0/a b")
    there.put("sources/0/1", b"\xff")
    with pytest.raises(OptionError, match="sources/0/1 is no text"):
        savepoints.create(there, world.at("new/0"))
    there.delete("sources/0/1")
    assert savepoints.create(there, world.at("new/0")).spark["sources/0/0"] == "kept"


def test_a_checkpoint_named_with_steps_up_is_noted_by_its_whole_name(world, monkeypatch):
    monkeypatch.chdir(world.base / "home")

    saved = savepoints.create(FileStorage("../checkpoint"), world.at("new/saved"))

    assert saved.checkpoint == (world.base / "checkpoint").as_uri()


def test_a_savepoint_by_reference_of_an_earlier_build_is_refused(world):
    """It names files of a checkpoint, and a claim there."""

    def edit(fields):
        home = (world.base / "checkpoint").as_uri()
        for file in fields["manifest"]["state"][0]["files"]:
            file["path"] = f"{home}/{file['path']}"
        return fields | {"claim": "keyed-state-claims/x.json"}

    world.write("copy", edit)
    errors = run_all(world, "copy")
    assert len(errors) >= 3
    assert all("Nothing was changed" in str(error) for error in errors)
