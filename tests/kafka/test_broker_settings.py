"""Checks that forbid nothing: what each finds, and what they cost a start."""

import time
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from fake_broker import CODES, SILENCE, FakeBroker, answer, part
from test_preflight import FACTS

from tallystick.epoch.two_phase import RunFacts
from tallystick.kafka import broker_settings, cluster, connection
from tallystick.kafka.client import Client
from tallystick.kafka.config import KafkaConfig
from tallystick.kafka.output import KafkaOutput
from tallystick.kafka.preflight import Replication
from tallystick.pipeline.sinks import SinkCluster, preflight
from tallystick.values import CheckFinding, Severity

CLOCK_PATIENCE_SLACK_S = 3.0


@pytest.mark.parametrize(("minutes", "is_short"), [(1439, True), (1440, False), (None, False)])
def test_tokens_must_outlive_a_night(minutes: int | None, is_short: bool) -> None:
    findings = list(broker_settings.retention(replace(FACTS, offsets_retention_minutes=minutes)))

    assert [finding.is_logged for finding in findings] == [True] * is_short
    for finding in findings:
        assert "offsets.retention.minutes is 1439" in str(finding)
        assert "Set offsets.retention.minutes=1440" in str(finding)


@pytest.mark.parametrize(
    ("replication", "severities"),
    [
        (Replication(3, 3, 3, 2), []),
        (Replication(3, 3, 3, None), []),
        (Replication(3, 1, 1, 1), [Severity.WARNING]),
        (Replication(3, 3, 3, 1), [Severity.WARNING]),
        (Replication(1, 1, 1, 1), [Severity.INFO]),
        (Replication(3, 3, 1, 2), [Severity.ERROR]),
        (Replication(3, 1, 0, 1), [Severity.ERROR, Severity.WARNING]),
    ],
)
def test_rows_must_outlive_a_broker(replication: Replication, severities: list[Severity]) -> None:
    findings = list(broker_settings.copies("out", replication))

    assert [finding.severity for finding in findings] == severities
    assert all("'out'" in finding.found for finding in findings)


def test_a_finding_is_one_line_with_its_remedy() -> None:
    finding = CheckFinding(Severity.WARNING, "disk", "it is full", "Epochs stop.", "df -h /a")

    assert str(finding) == "disk: it is full. Epochs stop. df -h /a."


def test_a_cluster_that_does_not_answer_is_not_waited_for() -> None:
    """Without a controller nobody knows the time, and a start has better things to do."""
    with FakeBroker({"DescribeQuorum": lambda _: SILENCE}) as broker:
        client = Client(broker.config(delivery_timeout_ms="60000"))
        begun_s = time.monotonic()
        (finding,) = broker_settings.clock(client)
        took_s = time.monotonic() - begun_s
        client.close()
        assert broker.requests_of("DescribeQuorum")

    assert not finding.is_logged
    assert "does not tell its time" in finding.found
    assert took_s < broker_settings.CLOCK_PATIENCE_S + CLOCK_PATIENCE_SLACK_S


@pytest.mark.broker
def test_a_start_asks_one_question_more_and_connects_no_more_often(
    config: KafkaConfig, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: Counter[str] = Counter()
    post, connect = connection.Network.post, connection.Connection

    def counted_post(
        self: connection.Network, node: int, request: object, deadline: float
    ) -> object:
        requests[type(request).__name__] += 1
        return post(self, node, request, deadline)

    def counted_connect(*given: object) -> object:
        requests["connections"] += 1
        return connect(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(connection.Network, "post", counted_post)
    monkeypatch.setattr(connection, "Connection", counted_connect)

    def counts() -> Counter[str]:
        requests.clear()
        sink = SinkCluster(KafkaOutput(config, topic, topic))
        try:
            preflight(sink, "quick", {}, RunFacts())
        finally:
            sink.broker.close()
        return Counter(requests)

    with monkeypatch.context() as patched:
        patched.setattr("tallystick.pipeline.sinks.check_broker_settings", lambda *_: ())
        before = counts()
    after = counts()

    assert after - before == {"DescribeQuorumRequest": 1}
    assert before["DescribeConfigsRequest"] == 1
    assert before["connections"] > 0


def test_a_topic_whose_settings_are_secret_does_not_hide_the_others() -> None:
    """All are asked for in one request, and a right may be missing for one of them."""

    def settings(request: Any) -> Any:
        result = part(request, "DescribeConfigsResult")
        entry = result.DescribeConfigsResourceResult
        results = [
            result(
                error_code=CODES["TopicAuthorizationFailed"]
                if resource.resource_name == "b"
                else 0,
                resource_type=resource.resource_type,
                resource_name=resource.resource_name,
                configs=[entry(name=name, value="2") for name in resource.configuration_keys],
            )
            for resource in request.resources
        ]
        return answer(request, results=results)

    with FakeBroker({"DescribeConfigs": settings}) as broker:
        broker.partitions = {"a": 2, "b": 2}
        client = Client(broker.config())
        facts = cluster.cluster_facts(client, ["a", "b"])
        client.close()

    assert facts.replication == {"a": Replication(1, 1, 1, 2), "b": Replication(1, 1, 1, None)}
    assert facts.message_bytes_max == 2
    assert len(broker.requests_of("DescribeConfigs")) == 1
