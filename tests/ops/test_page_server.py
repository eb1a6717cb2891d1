"""Who gets the page, and what it tells a browser to keep to; its facts are made here."""

import http.client
import re
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from tallystick.errors import OptionError, RecordError
from tallystick.ops.ui import rendering
from tallystick.ops.ui.actions import Actions
from tallystick.ops.ui.facts import (
    EpochFact,
    ErrorFact,
    NodeFact,
    PageFacts,
    PartitionFact,
    RunFact,
    TaskFact,
    TransactionFact,
)
from tallystick.ops.ui.server import COOKIE, Server, Source
from tallystick.run.console import LogLine
from tallystick.values import CheckFinding, Severity

HOSTILE = "<script>alert(1)</script>\x1b[2J"
RUN = RunFact("Running", 0, "r", "all the time", "jobs", 1, (("OSError", 2),), ((HOSTILE, 3),),
              HOSTILE, 1.0, 2.0, 3.0, None)  # fmt: skip
FACTS = PageFacts(
    name=HOSTILE,
    checkpoint=HOSTILE,
    looked_ms=1_700_000_000_000,
    decided_by=HOSTILE,
    producer=HOSTILE,
    partitions=(PartitionFact(HOSTILE, 0, 5, 15),),
    transactions=(TransactionFact(HOSTILE, HOSTILE, 1, 2, (HOSTILE,), HOSTILE),),
    findings=(CheckFinding(Severity.ERROR, HOSTILE, HOSTILE, HOSTILE, HOSTILE),),
    errors=(ErrorFact(0, HOSTILE, HOSTILE, HOSTILE, HOSTILE, HOSTILE),),
    run=RUN,
    kafka=True,
    graph=((NodeFact("tasks", HOSTILE, (HOSTILE,), 2, 1.0, 2.0, 0.5, 0.25),),),
    tasks=(TaskFact(HOSTILE, 0, HOSTILE, 1, 2, 3.0, 4.0, None),),
    log=(LogLine(0, "INFO", HOSTILE),),
)
TOKEN = "open sesame"


@pytest.fixture
def local() -> Iterator[Server]:
    server = Server(Source(lambda: FACTS), 0)
    server.start()
    yield server
    server.close()


@pytest.fixture
def for_others() -> Iterator[Server]:
    server = Server(Source(lambda: FACTS), 0, "0.0.0.0", TOKEN)
    server.start()
    yield server
    server.close()


def ask(
    server: Server, path: str = "/", method: str = "GET", body: str | None = None, **headers: str
) -> tuple[int, dict[str, str], str]:
    """Status, headers and body."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    names = {name: name.replace("_", "-") for name in headers}
    connection.request(method, path, body, {names[name]: text for name, text in headers.items()})
    answer = connection.getresponse()
    try:
        return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read().decode()
    finally:
        connection.close()


def test_what_others_wrote_is_shown_and_not_obeyed():
    page = rendering.page(FACTS)

    assert "<script>alert" not in page
    assert "\x1b" not in page
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;\\x1b[2J") >= 20


def test_an_epoch_that_is_open_is_not_called_healthy_where_no_run_is_here():
    """Its process may be dead: then somebody has to type something, and what is said."""
    command = "tallystick recover MODULE:PIPELINE --checkpoint '/data/it'"
    looked = replace(FACTS, run=None, findings=(), recovery=command)

    summary = rendering.sections(looked)["summary"]
    assert "An epoch is open" in summary
    assert "tallystick recover MODULE:PIPELINE --checkpoint &#39;/data/it&#39;" in summary
    assert "Nothing is lost" not in summary
    assert "start the query again" in rendering.sections(replace(looked, recovery=""))["summary"]
    here = replace(looked, run=RUN, decided=EpochFact(1, 0, 1, 1))
    assert "Nothing is lost, and nothing is stuck." in rendering.sections(here)["summary"]


def test_it_is_served_to_this_machine_by_its_own_names_only(local: Server):
    assert ask(local)[0] == 200
    assert ask(local, Host="localhost")[0] == 200
    assert ask(local, Host="evil.example")[0] == 400  # a name that somebody lets lead here
    assert ask(local, Host="evil.example", path="/facts.json")[0] == 400


def test_it_is_read_only(local: Server):
    for path in ("/", "/facts.json", "/events"):
        assert ask(local, path, "POST")[0] == 405
    assert ask(local, "/static/../server.py")[0] == 404
    assert ask(local, "/static/%2e%2e/server.py")[0] == 404


def test_a_browser_is_told_to_load_nothing_from_elsewhere(local: Server):
    status, headers, _ = ask(local)

    assert status == 200
    assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'self';")
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "no-store"


def test_others_need_the_token(for_others: Server):
    for path in ("/", "/facts.json", "/events", "/static/page.js"):
        status, _, text = ask(for_others, path)
        assert status == 401
        assert "needs its token" in text
        assert ask(for_others, path + "?token=wrong")[0] == 401
        assert ask(for_others, path, Authorization="Bearer wrong")[0] == 401

    query = urllib.parse.urlencode({"token": TOKEN})
    status, headers, _ = ask(for_others, f"/?{query}")

    assert status == 303
    assert TOKEN not in headers["location"]
    assert "HttpOnly" in headers["set-cookie"]
    assert "SameSite=strict" in headers["set-cookie"]
    cookie = headers["set-cookie"].partition(";")[0]
    assert cookie.startswith(COOKIE)
    assert ask(for_others, Cookie=cookie)[0] == 200
    assert ask(for_others, "/facts.json", Authorization=f"Bearer {TOKEN}")[0] == 200


@pytest.fixture
def acting() -> Iterator[tuple[Server, list[tuple[str, dict[str, Any]]]]]:
    """A page of this machine with a token, and the actions that it was asked for."""
    asked: list[tuple[str, dict[str, Any]]] = []

    def act(action: str, fields: Mapping[str, Any]) -> str:
        asked.append((action, dict(fields)))
        if action == "fail":
            raise RecordError("row S3CR3T is strange")
        return f"{action}: done"

    server = Server(Source(lambda: FACTS, act=act), 0, token=TOKEN)
    server.start()
    yield server, asked
    server.close()


BEARER = {"Authorization": f"Bearer {TOKEN}"}
JSON = {"Content_Type": "application/json"}


def test_an_action_needs_the_token_and_json_from_this_very_page(acting):
    server, asked = acting
    own = f"http://127.0.0.1:{server.port}"
    refused: list[tuple[int, dict[str, str]]] = [
        (401, JSON),
        (401, JSON | {"Authorization": "Bearer wrong"}),
        (415, BEARER),  # as a form of any page is sent, without a question before
        (415, BEARER | {"Content_Type": "text/plain"}),
        (403, BEARER | JSON | {"Origin": "http://evil.example"}),
        (403, BEARER | JSON | {"Origin": "http://127.0.0.1:1"}),  # the same site to a cookie
        (403, BEARER | JSON | {"Origin": "null"}),
        (400, BEARER | JSON | {"Host": "evil.example", "Origin": "http://evil.example"}),
    ]
    for status, headers in refused:
        assert ask(server, "/actions/stop", "POST", '{"drain": true}', **headers)[0] == status
    assert ask(server, "/actions/stop", "GET", **BEARER)[0] == 405
    assert ask(server, "/actions/stop", "OPTIONS", Origin="http://evil.example")[0] == 401
    assert ask(server, "/actions/stop", "POST", "[1]", **BEARER, **JSON)[0] == 400
    assert ask(server, "/actions/stop", "POST", "{", **BEARER, **JSON)[0] == 400
    assert asked == []

    for headers in ({}, {"Origin": own}):
        status, _, text = ask(
            server, "/actions/stop", "POST", '{"drain": true}', **BEARER, **JSON, **headers
        )
        assert (status, text) == (200, '{"text":"stop: done"}')
    assert asked == [("stop", {"drain": True})] * 2


def test_an_action_that_fails_answers_without_values(acting):
    server, _ = acting
    status, _, text = ask(server, "/actions/fail", "POST", "{}", **BEARER, **JSON)
    assert (status, "S3CR3T" in text) == (409, False)


def test_without_a_token_there_are_no_actions(local: Server):
    local.source.act = lambda action, fields: "done"
    status, _, text = ask(local, "/actions/stop", "POST", "{}", **JSON)
    assert (status, "TALLYSTICK_UI_TOKEN" in text) == (403, True)
    assert "data-action" not in ask(local)[2]
    assert "Read-only" in ask(local)[2]


def test_with_a_token_the_page_has_its_actions(acting):
    server, _ = acting
    assert ask(server, **BEARER)[2].count("data-action") == 4


@pytest.mark.parametrize(
    ("action", "fields", "words"),
    [
        ("dance", {}, "expected stop, rescale, or savepoint with a place"),
        ("savepoint", {}, "expected stop, rescale, or savepoint with a place"),
        ("rescale", {"parallelism": "0"}, "parallelism 0: expected a number of 1 or more"),
        ("rescale", {}, "parallelism None: expected"),
        ("stop", {"drain": True}, "no pipeline has begun there yet"),
        ("savepoint", {"place": "ftp://host/x"}, "ftp"),
    ],
)
def test_an_action_that_cannot_be_is_named(tmp_path, action, fields, words):
    with pytest.raises(OptionError, match=re.escape(words)):
        Actions(str(tmp_path), None)(action, fields)


def test_a_port_that_is_taken(local: Server):
    with pytest.raises(OptionError, match=f"cannot listen on port {local.port} of 127.0.0.1"):
        Server(Source(lambda: FACTS), local.port)


def test_many_who_look_cost_one_look():
    looks = []

    def read() -> PageFacts:
        looks.append(1)
        return FACTS

    source = Source(read)

    assert [source.facts() for _ in range(5)] == [FACTS] * 5
    assert len(looks) == 1
