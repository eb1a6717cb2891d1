"""A pipeline dies, a person settles what it left by `tallystick transactions`, and it goes on.

Each as a pipeline, and by a query of Spark's behind `KafkaSink`. A pipeline logs no plan: an epoch
may always be under way, so that a decision for it is made impossible before anything is aborted.
"""

import json
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from typer.testing import CliRunner, Result

from tallystick.checkpoint import protocol as c
from tallystick.checkpoint.coordinator import Coordinator
from tallystick.cli import app
from tallystick.inspection import DECIDED, inspect
from tallystick.storage import FileStorage
from tests.spark.flow import Facts, Flow
from tests.spark.test_sparks_log import run as run_in_spark
from tests.spark.topics import read_committed

pytestmark = [pytest.mark.broker, pytest.mark.spark, pytest.mark.timeout(300)]


def call(flow: Flow, command: str, *arguments: str) -> Result:
    servers = flow.kafka.kafka_options["kafka.bootstrap.servers"]
    words = ["transactions", command, *arguments, "--bootstrap-servers", servers]
    return CliRunner().invoke(app, [*words, "--checkpoint", str(flow.checkpoint)])


def listed(flow: Flow, *arguments: str) -> dict[str, dict[str, Any]]:
    """What is open of the pipeline, by id."""
    told = call(flow, "list", "--json", "--pipeline", flow.name, *arguments)
    assert told.exit_code == 0, told.output
    return {each["transaction"]: each for each in json.loads(told.stdout)["transactions"]}


def die(event: c.Event) -> None:
    """The driver gets no further than this, and tidies nothing up."""
    raise RuntimeError(f"died behind {type(event).__name__}")


SPARK = "foreachBatch"


@pytest.fixture(params=["resident", "jobs", SPARK])
def execution(request: pytest.FixtureRequest) -> Any:
    return request.param


def run(flow: Flow, transactions: str, execution: str) -> None:
    """Run over all that is there."""
    if execution == SPARK:
        run_in_spark(flow, flow.sink(transactions=transactions))
    else:
        flow.run(flow.pipeline(sink={"transactions": transactions}), execution=execution)


def run_and_die(flow: Flow, transactions: str, fact: str, execution: Any) -> int:
    """Run an epoch that is finished, and one that is not; its number."""
    flow.feed(100)
    run(flow, transactions, execution)
    flow.feed(60)
    step, facts = Coordinator.step, Facts(fact, die)

    def step_or_die(coordinator: Coordinator, event: c.Event) -> c.Action:
        facts(event)
        return step(coordinator, event)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Coordinator, "step", step_or_die)
        with pytest.raises((StreamingQueryException, RuntimeError), match="died behind"):
            run(flow, transactions, execution)
    return 1 if execution == SPARK else 2


def go_on(flow: Flow, transactions: str, execution: Any) -> None:
    """The pipeline, started again, finds nothing amiss."""
    flow.feed(40)
    run(flow, transactions, execution)
    flow.assert_exact()
    assert listed(flow) == {}


def test_what_a_dead_driver_has_decided_is_committed_by_hand(flow: Flow, execution: Any) -> None:
    epoch = run_and_die(flow, "task", "TransactionCommitted", execution)
    assert len(read_committed(flow.confluent, flow.topic_out)) == 100
    outputs = inspect(FileStorage(str(flow.checkpoint))).outputs

    for name, told in listed(flow).items():
        assert told["standing"] == "due"
        assert call(flow, "abort", name, "--quiet-for", "0").exit_code == 3
        assert call(flow, "commit", name).exit_code == 0

    assert len(read_committed(flow.confluent, flow.topic_out)) == 160
    assert (outputs[-1].epoch, outputs[-1].standing, outputs[-1].decided_by) == (
        epoch,
        DECIDED,
        "checkpoint",
    )
    assert sum(sink.records for sink in outputs[-1].sinks) == 60
    go_on(flow, "task", execution)


def test_what_a_dead_driver_has_not_decided_is_aborted_by_hand(flow: Flow, execution: Any) -> None:
    epoch = run_and_die(flow, "task", "ManifestWritten", execution)
    running = listed(flow)
    quiet = listed(flow, "--quiet-for", "0")

    assert {each["standing"] for each in running.values()} == {"running"}
    assert {(each["standing"], each["epoch"]) for each in quiet.values()} == {("unnamed", epoch)}
    for name in quiet:
        assert call(flow, "commit", name).exit_code == 3
        assert call(flow, "abort", name, "--quiet-for", "0").exit_code == 0
    assert len(read_committed(flow.confluent, flow.topic_out)) == 100
    go_on(flow, "task", execution)


def test_the_whole_epoch_of_a_dead_driver_is_aborted_by_hand(flow: Flow, execution: Any) -> None:
    run_and_die(flow, "epoch", "ManifestWritten", execution)
    (told,) = listed(flow, "--quiet-for", "0").values()

    assert told["standing"] == "whole_epoch"
    assert call(flow, "commit", told["transaction"], "--force").exit_code == 3
    assert call(flow, "abort", told["transaction"]).exit_code == 3
    assert call(flow, "abort", told["transaction"], "--quiet-for", "0").exit_code == 0
    assert listed(flow) == {}
    go_on(flow, "epoch", execution)
