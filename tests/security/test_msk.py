"""Tokens of Amazon MSK with IAM: Amazon's own signer makes them, a server before a broker checks.

The program that writes them is the one of the page about security.
"""

import base64
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic
from pyspark.sql import SparkSession

import tallystick as ts
from tallystick.errors import AuthorizationError
from tallystick.kafka import cluster
from tallystick.kafka.client import Client
from tallystick.kafka.config import KafkaConfig
from tallystick.testing import EmbeddedKafka
from tallystick.testing.node import HOST
from tallystick.testing.process import free_ports
from tallystick_tools.chaos.cluster import listeners_behind
from tests.failover.evidence import read_committed
from tests.security.msk_server import MskServer

pytestmark = pytest.mark.broker

PAGE = Path(__file__).parents[2] / "docs/security.md"
KEY, SECRET = "AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"
SESSION = "IQoJb3JpZ2luX2VjE" + "A/b+c=" * 150
"""Temporary keys come with a text of about this length, which is a part of the token."""
PATIENCE_S = 240.0
Msk = tuple[MskServer, dict[str, str]]


@pytest.fixture(scope="module")
def msk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Msk]:
    """Start the server in front of a broker; the options are for clients that go around it."""
    gate, direct = free_ports(2, HOST)

    settings = partial(listeners_behind, advertised=gate, own=direct)
    with EmbeddedKafka(properties=settings) as kafka:
        witness = {"bootstrap.servers": f"{HOST}:{direct}"}
        topics = [NewTopic(name, 2) for name in ("in", "out")]
        admin = AdminClient(witness)
        for creation in admin.create_topics(topics).values():
            creation.result(30)
        folder, behind = tmp_path_factory.mktemp("msk"), kafka.nodes[0].port
        with MskServer(folder, gate, behind, {KEY: SECRET}) as server:
            yield server, witness


@pytest.fixture(autouse=True)
def _as_before(msk: Msk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sign with the keys that the server knows, and forget the logins of other tests."""
    server, _ = msk
    server.tokens.clear()
    server.refused.clear()
    server.ahead_s, server.session_s, server.overdue = 0.0, 900.0, 0
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)


def client_of(server: MskServer, token: Path) -> Client:
    named = {"bootstrap.servers": f"{HOST}:{server.port}"}
    options = {name.removeprefix("kafka."): at for name, at in server.options(token).items()}
    return Client(KafkaConfig.from_options(named | options))


def signed(path: Path) -> str:
    from aws_msk_iam_sasl_signer import MSKAuthTokenProvider  # and boto3: 0.6 s

    token, _ = MSKAuthTokenProvider.generate_auth_token("eu-west-1")
    path.write_text(token)
    return str(token)


@contextmanager
def renewing(token: Path, every_s: float) -> Iterator[None]:
    """Run the page's program, quicker and in another folder."""
    blocks = [text.partition("```")[0] for text in PAGE.read_text().split("```python\n")[1:]]
    (program,) = [block for block in blocks if "MSKAuthTokenProvider" in block]
    for original, instead in (
        ("/run/kafka/token", str(token)),
        ("sleep(300)", f"sleep({every_s})"),
    ):
        assert original in program
        program = program.replace(original, instead)
    running = subprocess.Popen([sys.executable, "-c", program], cwd=token.parent)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not token.exists():
            assert running.poll() is None
            assert time.monotonic() < deadline, "no token came"
            time.sleep(0.05)
        yield
        assert running.poll() is None
    finally:
        running.kill()
        running.wait()


@pytest.mark.parametrize("session", ["", SESSION], ids=["permanent keys", "temporary keys"])
def test_a_token_of_amazons_signer_logs_in(
    msk: Msk, tmp_path: Path, session: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, _ = msk
    if session:
        monkeypatch.setenv("AWS_SESSION_TOKEN", session)
    token = signed(tmp_path / "token")
    client = client_of(server, tmp_path / "token")

    assert cluster.partition_counts(client, ["in"]) == {"in": 2}

    assert {*server.tokens} == {token}
    assert len(token) > len(session)
    client.close()


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("stranger", "the security token included in the request is invalid"),
        ("other secret", "access denied: signature"),
        ("expired", "access denied: time"),
        ("changed", "access denied: signature"),
        ("no request", "no presigned request: .*"),
    ],
)
def test_a_token_that_is_refused_is_told_and_not_shown(
    msk: Msk, tmp_path: Path, what: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last ones are what a program leaves that has ended, or that wrote something else."""
    server, _ = msk
    path = tmp_path / "token"
    if what == "stranger":
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDSOMEBODY")
    elif what == "other secret":
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET[::-1])
    token = signed(path)
    url = base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)).decode()
    if what == "expired":
        server.ahead_s = 901.0
    elif what == "changed":
        url = url.replace("Expires=900", "Expires=999")
        path.write_text(base64.urlsafe_b64encode(url.encode()).decode().rstrip("="))
    elif what == "no request":
        path.write_text("eyJhbGciOiJub25lIn0.e30.")
    client = client_of(server, path)

    with pytest.raises(AuthorizationError, match=f"refused the token of {path}.* time") as raised:
        cluster.partition_counts(client, ["in"])

    assert server.tokens == []
    (why,) = server.refused
    assert re.fullmatch(reason, why)
    assert why in str(raised.value)
    assert path.read_text() not in str(raised.value)
    client.close()


@pytest.mark.spark
def test_a_pipeline_outlives_its_sessions_with_the_program_of_the_page(
    msk: Msk, shared_spark: SparkSession, tmp_path: Path
) -> None:
    """Each session ends after two seconds, and no connection is cut for it."""
    server, witness = msk
    server.session_s = 2.0
    token = tmp_path / "renewed" / "token"
    token.parent.mkdir()
    options, producer = server.options(token), Producer(witness)
    servers = f"{HOST}:{server.port}"

    def values(rows: pa.RecordBatch) -> pa.RecordBatch:
        return rows.select(["value"])

    source = ts.KafkaSource(servers, topics=["in"], starting_offsets="earliest", options=options)
    sink = ts.KafkaSink(servers, topic="out", options=options)
    pipeline = ts.Pipeline("shipping").read(source).map_batches(values).write(sink)
    with renewing(token, 0.5):
        query = pipeline.start(shared_spark, checkpoint=str(tmp_path / "checkpoint"))
        try:
            for number in range(100):
                producer.produce("in", str(number), partition=number % 2)
                producer.flush()
                time.sleep(0.1)
            deadline = time.monotonic() + PATIENCE_S
            rows: list[str] = []
            while len(rows) < 100 and time.monotonic() < deadline:
                assert query.exception() is None
                rows_by_partition = read_committed(witness, "out", 2)
                rows = sorted(
                    (
                        row
                        for partition_rows in rows_by_partition.values()
                        for row in partition_rows
                    ),
                    key=int,
                )
        finally:
            query.stop()

    assert rows == [str(number) for number in range(100)]
    assert len({*server.tokens}) > 5, "the file is read at each login"
    assert server.refused == []
    assert server.overdue == 0, "a new login came before the old one ran out"
