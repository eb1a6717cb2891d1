"""Checkpoints and savepoints of every release are taken up by the code of today.

The data folder of the broker is kept too, and started again: a checkpoint belongs to the Kafka that
it was made with. Positions carry the id of the cluster and of each topic, and Kafka draws both
where they are created. On another cluster a start is refused, whatever its topics are called and
hold (`check_same_cluster`): no `LossPolicy` changes that, and a savepoint names the same ids. On
the same cluster, topics created again are other topics: `LossPolicy(recreated="restart")` would
read them from their first record, and not go on. An upgrade leaves Kafka alone, and so does this
test: ports apart, the broker is the one that the release wrote to, with its topics, token and
positions. `confluent-kafka` reads them, and they are compared with what was noted.

Each release was cut off after a decision, see `make`. So the code of today has to make visible what
the release decided, before it goes on.
"""

import json
import shutil
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import IsolationLevel
from pyspark.sql import SparkSession
from typer.testing import CliRunner

import tallystick as ts
from tallystick.__main__ import app
from tallystick.checkpoint import decision_log
from tallystick.checkpoint.folder import CheckpointFolder
from tallystick.checkpoint.state_files import contents_of
from tallystick.epoch import manifest, savepoint, tokens
from tallystick.ops.state_table import EXPIRY, table_of
from tallystick.source import offsets
from tallystick.state import changelog, keys
from tallystick.state.catalog import StateField, StepState
from tallystick.state.evolution import evolved
from tallystick.state.functions.processing import OWN_KINDS
from tallystick.state.key_groups import KeyGroupRange
from tallystick.storage.file_storage import FileStorage
from tallystick.testing import EmbeddedKafka
from tests.spark.sunk import hidden
from tests.spark.topics import ends, read_committed
from tests.upgrade import kept
from tests.upgrade.formats import Formats, formats_of
from tests.upgrade.kept import BROKER, Shop, check, entries_of, panes_of
from tests.upgrade.oracle import Expected, Rows
from tests.upgrade.pipelines import FORK, PAID, SHOP, UPGRADED, Record, records

needs_all = [pytest.mark.broker, pytest.mark.spark, pytest.mark.timeout(300)]
NEWEST = kept.releases()[-1]
PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
FIRST_BUILD = Path(__file__).with_name("first_build_manifest.json")
BEFORE_THE_FIRST_RELEASE = (
    "KeyError: 'origin'.* a build before release 0.1.0, which no release reads"
)
NOT_IN_EVERY_RUN = {
    "offsets": {"initial", "starts", "tick"},
    "kind of state": set(),
}
REMEDY = f"""
What is written today differs from what is kept of the newest release, {NEWEST}.
1. If a release before this change cannot read it, or could misread it: raise the VERSION beside the
   format, read the version before as well, and say so in docs/savepoints.md, "Upgrades".
2. Then keep a checkpoint that has it: python -m tests.upgrade.make VERSION
   with the version in pyproject.toml. If that one is released already, raise it first: what is kept
   of a release is never made again.
docs/change-it.md, "A format of files", has more."""


@dataclass
class Opened:
    """A release's checkpoints, laid out, on its broker; each run of today happens once."""

    release: str
    facts: dict[str, Any]
    shop: Shop

    @property
    def input(self) -> list[list[Record]]:
        """The records of each phase before the upgrade."""
        return self.facts["input"]

    @cached_property
    def laid_out(self) -> list[Path]:
        """The files before any run of today."""
        return sorted(path for path in self.shop.folder.rglob("*") if path.is_file())

    @cached_property
    def formats(self) -> Formats:
        """Their formats."""
        return formats_of(self.shop.folder, kept.tokens_of(self.facts))

    @cached_property
    def forked(self) -> dict[str, Rows]:
        """What a fork of the savepoint wrote and holds, after all that the release had read."""
        source, target = self.shop.folder / "savepoint", self.shop.folder / "shop-fork"
        assert call("savepoint", "restore", str(source), str(target)) == 0
        self.shop.run(FORK, 4)
        return self.shop.seen(FORK)

    @cached_property
    def upgraded(self) -> dict[str, dict[str, Rows]]:
        """What both pipelines wrote and hold after the upgrade, with more input."""
        assert self.forked, "it must not see the input that comes now"
        self.shop.feed(records(UPGRADED))
        for name, parallelism in ((SHOP, 1), (PAID, 4)):
            self.shop.run(name, parallelism)
        return {name: self.shop.seen(name) for name in (SHOP, PAID)}


def newest_manifest(checkpoint: Path) -> dict[str, Any]:
    """The manifest of the newest epoch."""
    path = max((checkpoint / "tallystick").glob("[0-9]*.json"))
    return json.loads(path.read_bytes().splitlines()[0])


def call(*command: str) -> int:
    """Call the command line, and return its exit code."""
    return CliRunner().invoke(app, command).exit_code


@pytest.fixture(scope="module", params=kept.releases())
def opened(
    request: pytest.FixtureRequest,
    shared_spark: SparkSession,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Opened]:
    folder, facts = tmp_path_factory.mktemp("kept"), kept.facts_of(request.param)
    kept.unpack(request.param, folder)
    broker = EmbeddedKafka(directory=folder / "broker", properties=BROKER, version=facts["kafka"])
    with broker as kafka:
        opened_shop = Opened(request.param, facts, Shop(kafka, shared_spark, folder))
        assert opened_shop.laid_out
        assert opened_shop.formats
        yield opened_shop


class TestKept:
    pytestmark = needs_all

    def test_what_is_kept_is_what_was_noted_and_its_files_are_still_hidden(
        self, opened: Opened
    ) -> None:
        """As outsiders see it, before anything of today has run."""
        shop, facts = opened.shop, opened.facts
        assert shop.groups() == facts["groups"]
        options = shop.kafka.confluent_options()
        for topic in ("orders", "returns", "prices", "payments"):
            pairs = sorted((record.key, record.value) for record in read_committed(options, topic))
            fed = [record[1:] for phase in opened.input for record in phase if record[0] == topic]
            assert pairs == sorted(map(tuple, fed))
        assert shop.windows("windows") == facts["shop"]["output"]
        for name in ("shop", "paid"):
            assert shop.rows(f"{name}-files") == facts[name]["files"]
            assert hidden(shop.folder / f"{name}-files")

    def test_inspect_finds_it_whole_and_a_bit_that_changed(
        self, opened: Opened, tmp_path: Path
    ) -> None:
        servers = opened.shop.kafka.bootstrap_servers
        command = ["inspect", "--verify", "--bootstrap-servers", servers]
        for name in ("shop", "paid"):
            assert call(*command, str(opened.shop.folder / name)) == 0
        damaged = shutil.copytree(opened.shop.folder / "shop", tmp_path / "damaged")
        file = max(damaged.glob("keyed-state/totals/*.snapshot"))
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
        assert call(*command, str(damaged)) == 1

    def test_a_fork_of_the_savepoint_goes_on_and_its_state_has_the_same_bytes(
        self, opened: Opened
    ) -> None:
        """It reads what the original read after the savepoint, in other epochs and tasks."""
        check(FORK, opened.forked, Expected(opened.input), opened.facts["savepoint"])
        entries = entries_of(opened.shop.folder / "shop-fork")
        if opened.release == NEWEST:
            assert entries == opened.facts["entries"], REMEDY
        assert entries.keys() == opened.facts["entries"].keys()

    def test_the_checkpoint_goes_on_as_if_nothing_had_happened(self, opened: Opened) -> None:
        shop, facts, seen = opened.shop, opened.facts, opened.upgraded
        expected = Expected([*opened.input, records(UPGRADED)])
        for name, folder in ((SHOP, "shop"), (PAID, "paid")):
            check(name, seen[name], expected)
            before = facts[folder]["files"]
            assert [row for row in before if row not in seen[name]["files"]] == []
            assert len(seen[name]["files"]) > len(before)
            assert hidden(shop.folder / f"{folder}-files") == []
            servers = shop.kafka.bootstrap_servers
            command = ["inspect", "--verify", "--bootstrap-servers", servers]
            assert call(*command, str(shop.folder / folder)) == 0
        for state in newest_manifest(shop.folder / "paid")["state"]:
            assert all(field["meaning"] for field in state["fields"]), "it had none before"
        new = [row for row in seen[SHOP]["output"] if row not in facts["shop"]["output"]]
        assert len(new) == len(seen[SHOP]["output"]) - len(facts["shop"]["output"])
        closed = {(row["item"], row["window_start"]): row["notes"] for row in new}
        was_open = panes_of(facts["shop"]["windows"])
        both = [at for at in was_open if len(closed.get(at, ())) > was_open[at]["n"]]
        assert both, "a window must have rows of before and after the upgrade"

        options, groups = shop.kafka.confluent_options(), shop.groups()
        for topic in ("orders", "returns", "prices"):
            positions = groups[f"tallystick-{SHOP}/{topic}"]
            last = ends(options, topic, IsolationLevel.READ_COMMITTED)
            assert positions == {f"{topic}-{at}": [last[at], ""] for at in last if last[at]}

    def test_todays_files_have_the_formats_that_are_kept_of_the_newest_release(
        self, opened: Opened
    ) -> None:
        """A key that is new, or gone, or a file of another name, is another format."""
        assert opened.upgraded
        if opened.release != NEWEST:
            return
        tokens = kept.tokens_of({"groups": opened.shop.groups()})
        known_formats, formats = (
            opened.formats,
            formats_of(opened.shop.folder, tokens, but=opened.laid_out),
        )
        assert formats.keys() >= known_formats.keys() - {"decider", "metadata", "savepoint"}
        for kind, now in formats.items():
            new = sorted({*now["keys"]} - {*known_formats[kind]["keys"]})
            gone = sorted(
                {*known_formats[kind]["keys"]} - {*now["keys"]} - NOT_IN_EVERY_RUN.get(kind, set())
            )
            assert now["versions"] == known_formats[kind]["versions"], f"{kind}: versions.{REMEDY}"
            assert not new, f"{kind}: it has {new}.{REMEDY}"
            assert not gone or kind == "path", f"{kind}: it lacks {gone}.{REMEDY}"

    def test_a_checkpoint_of_the_first_build_is_refused_by_name(
        self, opened: Opened, tmp_path: Path
    ) -> None:
        """The first build that wrote manifests, days before 0.1.0: also version 1, other keys."""
        path = tmp_path / "tallystick" / "000000000003-9-3f6a1c0d9e8b7a65.json"
        path.parent.mkdir()
        path.write_bytes(FIRST_BUILD.read_bytes())
        (tmp_path / "metadata").write_text('{"id":"6a0f2f0e-6a0c-4a3b-9b83-0a4f0d7a2b11"}')
        names = sorted(path_there.name for path_there in path.parent.iterdir())
        servers = opened.shop.kafka.bootstrap_servers
        pipeline = (
            ts.Pipeline("first-build")
            .read(ts.KafkaSource(servers, topics=["orders"]))
            .write(ts.KafkaSink(servers, topic="windows-fork"))
        )

        with pytest.raises(ts.ManifestError, match=BEFORE_THE_FIRST_RELEASE) as refused:
            pipeline.start(
                opened.shop.spark, checkpoint=str(tmp_path), trigger={"availableNow": True}
            ).awaitTermination(150)

        assert path.name in str(refused.value)
        assert sorted(path_there.name for path_there in path.parent.iterdir()) == names


def test_each_format_is_of_the_version_that_is_kept_of_the_newest_release(tmp_path: Path) -> None:
    """In a second, without a broker: the constants in the code, and the bytes that are kept."""
    todays = {
        "manifest": manifest.VERSION,
        "savepoint": savepoint.VERSION,
        "decider": decision_log.VERSION,
        "decision": decision_log.VERSION,
        "offsets": offsets.VERSION,
        "token": tokens.TOKEN_VERSION,
        "key groups": keys.HASH_VERSION,
        "state file": changelog.MAGIC.decode(),
    }
    kept.unpack(NEWEST, tmp_path)
    formats = formats_of(tmp_path, kept.tokens_of(kept.facts_of(NEWEST)))
    versions = {kind: entry["versions"] for kind, entry in formats.items() if entry["versions"]}
    assert versions == {kind: [version] for kind, version in todays.items()}, REMEDY


def changed(state: StateField) -> StateField:
    """The state with a column before all others, as a program of today may declare it.

    A state of a processor also gets a time to live, or loses the one it has.
    """
    if state.kind in OWN_KINDS:
        struct = json.loads(state.value_schema)
        struct["fields"].insert(0, {**struct["fields"][0], "name": "new", "type": "long"})
        ttl_ms = 0 if state.ttl_ms else 1000
        return replace(state, value_schema=json.dumps(struct), ttl_ms=ttl_ms)
    return replace(
        state, value_schema=json.dumps([["new", "int64"], *json.loads(state.value_schema)])
    )


@pytest.mark.parametrize("release", kept.releases())
def test_a_program_that_changes_reads_the_state_of_a_release(release: str, tmp_path: Path) -> None:
    """State of every kind gets a column; without a broker: as `read_state` reads it."""
    kept.unpack(release, tmp_path)
    kinds, ttls = set(), set()
    for folder in ("shop", "paid"):
        storage = FileStorage(str(tmp_path / folder))
        (manifest,) = CheckpointFolder(storage).newest_manifests(1)
        for step in manifest.state:
            kinds |= {state.kind for state in step.fields}
            fields = tuple(map(changed, step.fields))
            after = evolved(step, fields, step.next_id, {}, timestamp_ms=1, defaults={})
            assert after.former
            ttls |= {one.ttl.is_added for one in after.former[-1].states if one.ttl is not None}
            everything = KeyGroupRange(0, step.max_parallelism - 1)
            before, now = (
                table_of(one, contents_of(one, everything, storage)).to_pylist()
                for one in (step, StepState.from_json(after.to_json()))
            )
            assert before
            assert [without_new(row) for row in now] == [without_new(row) for row in before]
            assert now != before
    assert kinds >= {"columns", "panes", "rows", "table", "elements", *OWN_KINDS}
    assert ttls == {False, True}


def without_new(value: Any) -> Any:
    """A value without the columns that are new, which must be null, and without its expiry."""
    if isinstance(value, dict):
        assert all(part is None for name, part in value.items() if name.rstrip("_") == "new")
        others = (name for name in value if name.rstrip("_") not in ("new", EXPIRY.name))
        kept_parts = {name: value[name] for name in others}
        return {name: without_new(part) for name, part in kept_parts.items()}
    return [*map(without_new, value)] if isinstance(value, list) else _of_pair(value)


def _of_pair(value: Any) -> Any:
    """An entry of a map is a pair in Python."""
    return tuple(map(without_new, value)) if isinstance(value, tuple) else value


def test_a_checkpoint_of_the_version_in_pyproject_is_kept() -> None:
    version = tomllib.loads(PYPROJECT.read_text())["project"]["version"]
    assert version in kept.releases(), (
        f"pyproject.toml has version {version}, and nothing is kept of it. Before it is released: "
        f"python -m tests.upgrade.make {version}"
    )
