"""The page for operators in a real Chromium: its numbers against what others say is true.

One pipeline runs and is kept lagging, one has had all that can happen to one, one was killed with
its transaction open, one so long ago that Kafka is about to abort it, one has lost a file of its
state. `SCREENSHOTS=docs/images` leaves pictures of them there.
"""

import re
import socket
import time
import urllib.error
import urllib.request
from typing import Any

import pytest
from confluent_kafka import IsolationLevel

import tallystick as ts
from tallystick.errors import OptionError
from tallystick.ops import savepoints
from tallystick.ops.cli_show import size_text
from tallystick.storage.file_storage import FileStorage
from tallystick.testing.process import free_ports
from tests.ops.browser import Browser
from tests.spark.conftest import Drivers
from tests.spark.flow import Flow, pass_on
from tests.spark.numbering import picked
from tests.spark.page_look import (
    MARKS,
    assert_not_shown,
    facts_of,
    first_of_open,
    number,
    page_of,
    recovery_of,
    shown,
)
from tests.spark.test_savepoint_restore import Counting
from tests.spark.topics import (
    ends,
    group_positions,
    pending,
    produce,
    read_committed,
)
from tests.waiting import wait_until

pytestmark = MARKS
TIMEOUT_MS = 30_000
"""Long enough that a busy machine has opened the page before Kafka aborts the transaction."""
CLOCKS_MS = 10_000
"""Between the begin of a transaction and the first record of a partition; and between two looks."""


def positions(flow: Flow) -> dict[int, int]:
    """How far the input is read, as the consumer group has it."""
    return group_positions(flow.confluent, f"tallystick-{flow.name}")


def warned(url: str) -> list[str]:
    """The checks that found something worth a word."""
    return [seen["check"] for seen in facts_of(url)["findings"] if seen["severity"] > 0]


def test_every_number_of_a_running_pipeline_is_true(flow: Flow, browser: Browser) -> None:
    counting, (port,) = Counting(flow), free_ports(1, "127.0.0.1")
    counting.feed(60)
    query = counting.pipeline().start(
        flow.spark,
        checkpoint=str(flow.checkpoint),
        trigger={"processingTime": "1 hour"},
        ui_port=port,
    )
    url = f"http://127.0.0.1:{port}/"
    assert [finding for finding in facts_of(url)["findings"] if finding["severity"] > 0] == []
    try:
        browser.wait_for(lambda: query.lastProgress is not None)
        counting.feed(25)  # which no epoch reads for an hour
        browser.open(url)
        browser.wait_for(lambda: browser.text("lag") == "25")
        progress = query.lastProgress
        assert progress is not None

        # What librdkafka says of the topics, and of the group.
        input_ends = ends(flow.confluent, flow.topic_in, IsolationLevel.READ_COMMITTED)
        wait_until(  # Kafka shows the group's offsets once it has written the markers
            lambda: sum(positions(flow).values()) == 60,
            lambda: f"the group is at {positions(flow)}, and 60 records are done",
        )
        done = positions(flow)
        sources = browser.rows("sources")
        assert {int(row[1]): [number(cell) for cell in row[2:]] for row in sources} == {
            partition: [done.get(partition, 0), end, end - done.get(partition, 0)]
            for partition, end in input_ends.items()
        }
        output = read_committed(flow.confluent, flow.topic_out)
        assert ["Rows to " + flow.topic_out, f"{len(output)} in this run"] in browser.rows(
            "summary"
        )
        # What the query, the checkpoint's files and Kafka's transactions say.
        assert browser.text("status") == query.status["message"]
        assert browser.text("epoch") == str(progress["batchId"])
        assert browser.text("open") == "0"
        assert browser.text("aborted") == "0"
        assert browser.text("starts") == "1"
        # Its trigger is longer than a transaction may take; nothing else is worth a word.
        assert warned(url) == ["settings"]
        files = list((flow.checkpoint / "keyed-state").rglob("*.*"))
        text = browser.text("state")
        assert f"in {len(files)} files, 16 key groups" in text, (text, files)
        assert "0 late rows" in text
        facts = facts_of(url)
        assert facts["steps"][0]["size"] == sum(file.stat().st_size for file in files)
        assert sum(size for _, _, size in facts["steps"][0]["parts"]) > 0
        newest = facts["epochs"][-1]
        assert (newest["number"], newest["rows"]) == (progress["batchId"], len(output))
        assert newest["offsets"] == progress["epochSize"]["offsets"] == 60
        assert newest["records"] == progress["numInputRows"] == 60
        look_at_history(browser, progress, newest, len(output))
        assert browser.text("trigger") == "processingTime: 1 hour"
        look_at_the_job(browser, flow, progress)
        for chart in ("chart-parts", "chart-counts"):
            assert browser.script(f"return !!document.querySelector('#{chart} canvas')"), chart
        assert browser.complaints() == []
        look_at_forms(browser)
        browser.picture("page-lagging", shown(flow))
    finally:
        query.stop()
    browser.wait_for(lambda: browser.text("status") == "Stopped")


def bytes_of(progress: Any) -> tuple[int, int]:
    written = progress["bytes"]["written"] + progress["files"]["bytes"]
    return progress["bytes"]["read"], written


def look_at_history(browser: Browser, progress: Any, newest: Any, rows: int) -> None:
    """The only epoch has the records, bytes and duration of its progress."""
    took_ms = progress["durationMs"]["triggerExecution"]
    assert abs(sum(ms for _, ms in newest["parts_ms"]) - took_ms) < 20
    table = browser.rows("epochs")
    assert [row[0] for row in table] == [str(progress["batchId"])]
    assert table[0][2:4] == ["60", str(rows)]
    assert table[0][4:6] == [size_text(size) for size in bytes_of(progress)]
    assert abs(number(table[0][6]) - took_ms) < 20


def look_at_the_job(browser: Browser, flow: Flow, progress: Any) -> None:
    """The graph has the steps of the pipeline in their order, the tasks what the epoch counted."""
    names = "return [...document.querySelectorAll('#job .node h3')].map((it) => it.textContent)"
    source, *steps, sink = browser.script(names)
    assert steps == ["read", "numbers", "write"]
    nodes = "return [...document.querySelectorAll('#job .node')].map((it) => it.textContent)"
    texts = browser.script(nodes)
    assert isinstance(texts, list)
    assert flow.topic_in in texts[0]
    assert "lag 25" in texts[0]
    assert "only_values" in texts[1]
    assert "by k" in texts[2]
    assert flow.topic_out in texts[-1]
    assert (source, sink) != ("", "")
    rows = browser.rows("job")
    for step in progress["tasks"]:
        own = [row for row in rows if row[0] == step["step"]]
        assert len(own) == step["tasks"]
        assert {row[2] for row in own} == {socket.gethostname()}
        assert sum(number(row[3]) for row in own) == step["rowsIn"]
        assert sum(number(row[4]) for row in own) == step["rowsOut"]
    log = browser.script("return document.querySelector('#log .log').textContent")
    assert f"reads {flow.topic_in}" in str(log)


def test_the_actions_of_a_page_with_a_token(
    flow: Flow, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They do what the commands do; a question that is not confirmed does nothing."""
    counting, (port,) = Counting(flow), free_ports(1, "127.0.0.1")
    counting.feed(60)
    monkeypatch.setenv("TALLYSTICK_UI_TOKEN", "open-sesame")
    query = counting.pipeline().start(flow.spark, checkpoint=str(flow.checkpoint), ui_port=port)
    place = flow.folder / "saved"
    try:
        query.processAllAvailable()
        newest = query.lastProgress
        assert newest is not None
        browser.open(f"http://127.0.0.1:{port}/?token=open-sesame")
        assert "open-sesame" not in browser.driver.current_url
        rescale = "#actions [data-action=rescale]"
        browser.type("parallelism", "3")
        browser.click(rescale, confirms=False)
        assert browser.text("answer") == ""
        browser.click(rescale)
        browser.wait_for(lambda: "goes on with parallelism 3" in browser.text("answer"))
        browser.type("place", "s3://backups/orders/monday")
        browser.picture("page-actions", shown(flow))
        browser.type("place", str(place))
        browser.click("#actions [data-action=savepoint]")
        saved = f"saved epoch {newest['batchId']} to {place}"
        browser.wait_for(lambda: saved in browser.text("answer"))
        browser.click("#actions [data-drain]")
        browser.wait_for(lambda: "was the last one, and is committed" in browser.text("answer"))
        browser.wait_for(lambda: browser.text("status") == "Stopped")
        assert not query.isActive
        assert browser.complaints() == []
        assert "asks: stop, draining" in str(
            browser.script("return document.querySelector('#log .log').textContent")
        )
    finally:
        query.stop()
    of_savepoint = savepoints.read(FileStorage(str(place))).manifest
    assert of_savepoint.checkpoint_id == newest["batchId"]
    assert counting.output() == counting.expected(0, 60)


def look_at_forms(browser: Browser) -> None:
    """It is whole at 400 px, dark and light; what can be opened is reached by the keyboard."""
    browser.resize(400)
    browser.wait_for(lambda: browser.script("return document.documentElement.scrollWidth") == 400)
    colours = []
    for scheme in ("light", "dark"):
        browser.prefer(scheme)
        colours.append(browser.script("return getComputedStyle(document.body).color"))
        axis = "const plot = drawn.counts.plot; return plot.axes[0].stroke(plot, 0)"
        browser.wait_for(lambda: browser.script(axis) == colours[-1])  # noqa: B023  drawn again
    browser.prefer("light")
    browser.resize(1100)
    assert colours[0] != colours[1], colours
    assert browser.script("return document.querySelectorAll('.wide').length") != 0
    assert browser.script("return document.querySelectorAll('.wide:not([tabindex])').length") == 0
    unnamed = browser.script(
        "return [...document.querySelectorAll('section, [role=img], meter')]"
        ".filter((each) => !each.ariaLabel && !each.getAttribute('aria-labelledby')).length"
    )
    assert unnamed == 0
    assert browser.script(
        "const it = document.querySelector('details > summary'); it.focus();"
        "return document.activeElement === it"
    )


def test_copies_of_state_that_are_made_anew_are_counted(flow: Flow) -> None:
    counting = Counting(flow)
    counting.feed(30)
    flow.run(counting.pipeline(parallelism=2), execution="jobs")
    counting.feed(30)
    pipeline = counting.pipeline(parallelism=3)  # other key groups: no copy of theirs is there

    query = pipeline.start(flow.spark, checkpoint=str(flow.checkpoint), execution="jobs")
    try:
        query.processAllAvailable()
        counting.feed(30)
        query.processAllAvailable()
        epochs = query.recentProgress
    finally:
        query.stop()

    rebuilt = [step["rebuiltCopies"] for epoch in epochs for step in epoch["tasks"][1:2]]
    assert len(rebuilt) >= 2
    assert 1 <= rebuilt[0] <= 3  # of the tasks that own a key
    assert rebuilt[-1] == 0


def test_a_run_that_fails_says_what_to_do_after_its_end(flow: Flow, browser: Browser) -> None:
    """A function's own error may quote what it could not use: that is for the log alone."""
    (port,) = free_ports(1, "127.0.0.1")
    flow.feed(10)
    pipeline = flow.pipeline(raising())
    query = pipeline.start(
        flow.spark, checkpoint=str(flow.checkpoint), execution="jobs", ui_port=port
    )
    with pytest.raises(Exception, match="row S3CR3T is strange"):
        query.awaitTermination(120)

    url = f"http://127.0.0.1:{port}/"
    browser.open(url)
    browser.wait_for(lambda: browser.text("status") == "Failed")

    assert "The message is in the driver's log." in browser.text("errors")
    assert "mend that, and start again" in browser.text("errors")
    assert "The run has ended with an error" in browser.text("summary")
    assert int(browser.text("aborted")) >= 1
    assert_not_shown("S3CR3T", url, browser)


def raising() -> Any:
    def raise_it(batch: Any) -> Any:
        raise ValueError("row S3CR3T is strange")

    return raise_it


@pytest.mark.parametrize("execution", ["jobs", "resident"])
def test_a_record_that_ends_a_run_is_named_and_not_shown(
    execution: Any, flow: Flow, browser: Browser
) -> None:
    (port,) = free_ports(1, "127.0.0.1")
    produce(flow.confluent, flow.topic_in, [("k", "S3CR3T is no JSON")], partition=2)
    source = flow.source(value=ts.Json("k string, n bigint", mode="failfast"))
    pipeline = ts.Pipeline(flow.name).read(source).map_batches(picked())
    query = pipeline.write(flow.sink(key="k", value=ts.Json())).start(
        flow.spark, checkpoint=str(flow.checkpoint), execution=execution, ui_port=port
    )
    with pytest.raises(ts.RecordError, match="S3CR3T is no JSON"):
        query.awaitTermination(120)

    url = f"http://127.0.0.1:{port}/"
    browser.open(url)
    browser.wait_for(lambda: browser.text("status") == "Failed")
    text = browser.text("errors")
    assert "RecordError" in text
    assert "kafka-console-consumer --bootstrap-server SERVERS --topic T --partition P" in text
    if execution == "resident":  # Spark's own tasks hand over the message alone
        place = f"topic {flow.topic_in}, partition 2, offset 0"
        assert f"{place}: the value is not a JSON object of the schema asked for." in text
    assert_not_shown("S3CR3T", url, browser)


def test_a_killed_pipeline_with_its_transaction_open(
    flow: Flow, drivers: Drivers, browser: Browser
) -> None:
    flow.feed(120)
    driver = drivers.take()
    driver.run(flow.spec(kill_at="EpochRan", occurrence=2, execution="jobs", epoch_records=40))
    driver.wait_until_killed()
    assert any(pending(flow.confluent, flow.topic_out).values()), "no transaction was left open"

    with page_of(flow.checkpoint, flow.kafka.bootstrap_servers) as url:
        browser.open(url)
        browser.wait_for(lambda: browser.text("open") == "1")

        (row,) = browser.rows("transactions")
        assert row[0] == f"tallystick-{flow.name}"
        assert row[1] == "Ongoing"
        assert "or a recovery aborts it" in row[5]
        written = {
            partition
            for partition, count in pending(flow.confluent, flow.topic_out).items()
            if count
        }
        assert {
            int(transaction.rpartition("-")[2]) for transaction in row[4].split(", ")
        } >= written
        assert browser.text("status") == "an epoch is open"
        assert browser.text("epoch") == "1"
        lag = sum(ends(flow.confluent, flow.topic_in, IsolationLevel.READ_COMMITTED).values())
        lag -= sum(positions(flow).values())
        assert number(browser.text("lag")) == lag >= 80
        facts = facts_of(url)
        (open_transaction,) = facts["transactions"]
        assert 0 <= open_transaction["age_ms"] < open_transaction["timeout_ms"] == 300_000
        # It is open for less than a minute: perhaps a run is writing it, perhaps not.
        assert "An epoch is open." in browser.text("summary")
        assert "Nothing is lost" not in browser.text("summary")
        assert recovery_of(flow) in browser.text("summary")
        browser.picture("page-killed", shown(flow))
    flow.run(execution="jobs")
    flow.assert_exact()
    with page_of(flow.checkpoint, flow.kafka.bootstrap_servers) as url:
        browser.open(url)
        assert "Nothing is lost, and no epoch is open." in browser.text("summary")
        assert browser.text("status") == "no epoch is open"


def test_a_transaction_that_lingers_beyond_half_of_its_timeout(
    flow: Flow, drivers: Drivers, browser: Browser
) -> None:
    flow.feed(120)
    driver = drivers.take()
    spec = {"kill_at": "EpochRan", "occurrence": 2, "execution": "jobs", "epoch_records": 40}
    driver.run(flow.spec(**spec, transaction_timeout_ms=TIMEOUT_MS))
    driver.wait_until_killed()
    written = first_of_open(flow)
    time.sleep(max(0.0, written.timestamp / 1000 + TIMEOUT_MS / 2000 + 1 - time.time()))
    assert any(pending(flow.confluent, flow.topic_out).values()), "it was aborted meanwhile"

    with page_of(flow.checkpoint, flow.kafka.bootstrap_servers) as url:
        browser.open(url)

        assert "1 warning: nothing is lost. What to do is below." in browser.text("summary")
        assert browser.script(
            "return getComputedStyle(document.querySelector('.answer')).color =="
            "getComputedStyle(document.querySelector('#findings article.warning h3')).color"
        ), "the banner has the colour of a warning"
        text = browser.text("findings")
        assert f"tallystick-{flow.name} is open for " in text
        assert f"Kafka aborts it after {TIMEOUT_MS // 1000} s" in text
        assert f"If the pipeline is dead: {recovery_of(flow)}" in text
        (row,) = browser.rows("transactions")
        assert (row[1], row[3]) == ("Ongoing", f"{TIMEOUT_MS // 1000} s")
        facts = facts_of(url)
        (open_transaction,) = facts["transactions"]
        assert open_transaction["timeout_ms"] == TIMEOUT_MS
        assert open_transaction["age_ms"] >= TIMEOUT_MS / 2
        begun_ms = facts["looked_ms"] - open_transaction["age_ms"]
        assert abs(begun_ms - written.timestamp) < CLOCKS_MS, "as old as what is written in it"
        meter = "const it = document.querySelector('#transactions meter'); return [it.max, it.high]"
        assert browser.script(meter) == [TIMEOUT_MS, TIMEOUT_MS // 2]
        browser.picture("page-lingering", shown(flow))
    flow.run(execution="jobs")
    flow.assert_exact()


def test_a_file_of_state_that_is_missing(flow: Flow, browser: Browser) -> None:
    counting = Counting(flow)
    counting.feed(60)
    flow.run(counting.pipeline(), execution="jobs")
    lost = sorted((flow.checkpoint / "keyed-state").rglob("*.*"))[0]
    lost.unlink()

    with page_of(flow.checkpoint, flow.kafka.bootstrap_servers) as url:
        browser.open(url)
        assert re.search(r"1 error: somebody has to act", browser.text("summary"))
        text = browser.text("findings")
        assert lost.name in text
        assert "Put it back from a backup; then tallystick inspect" in text
        browser.picture("page-missing-file", shown(flow))


def test_without_kafka_nothing_is_said_to_be_in_order(flow: Flow, browser: Browser) -> None:
    flow.feed(20)
    flow.run(execution="jobs")
    (nobody,) = free_ports(1, "127.0.0.1")

    with page_of(flow.checkpoint, f"127.0.0.1:{nobody}") as url:
        browser.open(url)

        assert "1 error" in browser.text("summary")
        assert "Connection refused" in browser.text("findings")
        assert browser.text("status") == browser.text("open") == browser.text("lag") == "not known"


def test_the_port_is_taken_or_none(flow: Flow) -> None:
    (port,) = free_ports(1, "127.0.0.1")
    pipeline = flow.pipeline(pass_on())
    with page_of(flow.checkpoint, flow.kafka.bootstrap_servers) as url:
        taken = int(url.rstrip("/").rpartition(":")[2])
        with pytest.raises(OptionError, match=f"cannot listen on port {taken}"):
            pipeline.start(flow.spark, checkpoint=str(flow.checkpoint), ui_port=taken)
    with pytest.raises(OptionError, match="ui_port=0: expected 1 to 65535"):
        pipeline.start(flow.spark, checkpoint=str(flow.checkpoint), ui_port=0)
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/")
    assert isinstance(pipeline, ts.Pipeline)
