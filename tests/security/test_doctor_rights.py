"""`tallystick doctor` as users with the least rights, and with each of them missing."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tallystick.ops.cli import app
from tallystick.testing import EmbeddedKafka
from tests.failover.job import Job
from tests.failover.known_rows import Shape
from tests.security.people import PASSWORDS, TOPIC, config_of, options_of
from tests.security.test_rights import LACKING, assert_no_secret

pytestmark = [pytest.mark.broker, pytest.mark.timeout(180)]
USERS = {**LACKING, "observer": []}


@pytest.mark.parametrize(("user", "lacking"), USERS.items(), ids=USERS)
def test_what_a_login_lacks_is_found_with_the_acl_to_add(
    user: str, lacking: list, guarded: EmbeddedKafka, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "metadata").write_text('{"id": "doctors"}')
    shape = Shape(user, TOPIC, (0, 1))
    job = Job(
        shape, config_of(guarded, "admin"), folder, lineage="doctors", has_loop=True,
        accepted=frozenset({"new-lineage-after-" + user}),
    )  # fmt: skip
    job.run_until(1)
    job.close()
    options = options_of(guarded, user)
    servers = options.pop("bootstrap.servers")
    login = tmp_path / "login.properties"
    login.write_text("".join(f"{name}={value}\n" for name, value in options.items()))
    words = ["doctor", str(folder), "--bootstrap-servers", servers, "--kafka-options", str(login)]

    result = CliRunner().invoke(app, [*words, "--json"])

    said = json.loads(result.stdout)
    found = [each for each in said["findings"] if each["check"] == "rights"]
    assert [each["severity"] for each in found] == ["error"] * bool(lacking)
    for right in lacking:
        assert f"user {user!r} lacks" in found[0]["found"]
        assert str(right) in found[0]["found"]
        assert right.grant in found[0]["found"]
    wrong = {each["check"] for each in said["findings"] if each["severity"] != "info"}
    if user == "alice":
        assert (result.exit_code, wrong) == (1, {"settings"}), "she may not see settings"
    elif user == "observer":
        assert (result.exit_code, wrong) == (0, set())
    else:
        assert result.exit_code == 2
    assert user in PASSWORDS
    assert_no_secret(result.output)
