"""Make what is kept of a release, in a few minutes: `python -m tests.upgrade.make 0.2.0`.

Run it with the code of the release. What was kept before under that version is replaced, which is
right only as long as it is not released. The phases are those of `pipelines.PHASES`:

1. Both pipelines run over the first one, with two tasks for each keyed step, and stop. A savepoint
   of one of them is taken and rewritten, and its checkpoint is restored from that.
2. They run over the second one, with three tasks.
3. They run over the third one, which is an epoch, and the driver dies after its decision: Kafka
   shows the rows, or the checkpoint's log has the entry, and the files are still hidden.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from pyspark.sql import SparkSession
from typer.testing import CliRunner

import tallystick as ts
from tallystick.__main__ import app
from tallystick.epoch import protocol as c
from tallystick.testing import EmbeddedKafka
from tests.spark.flow import Facts
from tests.spark.sunk import hidden
from tests.upgrade.formats import formats_of
from tests.upgrade.kept import BROKER, KAFKA, Shop, check, entries_of, keep, tokens_of
from tests.upgrade.oracle import Expected
from tests.upgrade.pipelines import CUT_OFF, GROUP_COUNT, KEYED, PAID, SHOP, TOPICS, records


def die(event: c.Event) -> None:
    """The driver gets no further than this, and tidies nothing up."""
    raise RuntimeError(f"died after {type(event).__name__}")


def call(command: str, *arguments: Any) -> None:
    """Call a command for savepoints."""
    done = CliRunner().invoke(app, ["savepoint", command, *map(str, arguments)])
    assert done.exit_code == 0, done.output


def run_both(shop: Shop, parallelism: int) -> list[int]:
    """Run both pipelines to the end of their input, and return how many epochs each took.

    One has few, so that the seed of its restored checkpoint is retained; the other has many, so
    that its changelogs are merged. The last phase is a single epoch with twelve rows.
    """
    epochs = []
    for name, shop.epoch_rows in ((PAID, 4), (SHOP, 12)):
        epochs.append(shop.run(name, parallelism))
    return epochs


def make(release: str, folder: Path, spark: SparkSession) -> None:
    """Run the pipelines, and keep what is there when they are dead."""
    phases = [records(phase) for phase in range(CUT_OFF + 1)]
    with EmbeddedKafka(directory=folder / "broker", properties=BROKER, version=KAFKA) as kafka:
        for topic, partitions in TOPICS.items():
            kafka.create_topic(topic, partitions)
        shop = Shop(kafka, spark, folder)
        shop.feed(phases[0])
        epochs = run_both(shop, 2)
        at_savepoint = shop.seen(SHOP)
        check(SHOP, at_savepoint, Expected(phases[:1]))
        (folder / "shop").rename(folder / "first")
        groups = [f"--max-parallelism={uid}={GROUP_COUNT}" for uid in KEYED]
        call("create", folder / "first", folder / "copy")
        call("migrate", folder / "copy", folder / "savepoint", *groups, "--scratch", folder)
        call("restore", folder / "savepoint", folder / "shop")

        shop.feed(phases[1])
        epochs += run_both(shop, 3)
        assert min(epochs) > 1, f"epochs of the phases: {epochs}"

        shop.feed(phases[CUT_OFF])
        for name in (SHOP, PAID):
            with pytest.raises(RuntimeError, match="died after TransactionCommitted"):
                shop.run(name, 3, Facts("TransactionCommitted", die))
            assert hidden(folder / f"{name.removeprefix('kept-')}-files"), "nothing was left hidden"
        facts = {
            "release": release,
            "kafka": KAFKA,
            "folder": str(folder),
            "input": phases,
            "savepoint": at_savepoint,
            "shop": shop.seen(SHOP),
            "paid": shop.seen(PAID),
            "groups": shop.groups(),
        }
    formats = formats_of(folder, tokens_of(facts))
    assert "origin.savepoint" in formats["manifest"]["keys"], "no seed is kept"
    paths = str(formats["path"])
    assert ".snapshot" in paths, "no snapshot is kept"
    assert "-merged.changelog" in paths, "no merged changelog is kept"
    facts["entries"] = entries_of(folder / "shop")
    keep(release, folder, facts)


def main(release: str) -> None:
    """Make it in a folder of its own."""
    with TemporaryDirectory(prefix="tallystick-kept-") as name:
        folder = Path(name)
        local = {"spark.executorEnv.TALLYSTICK_STATE_DIR": str(folder / "state")}
        spark = ts.spark_session("kept", master="local[2]", config=local)
        try:
            make(release, folder, spark)
        finally:
            spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
