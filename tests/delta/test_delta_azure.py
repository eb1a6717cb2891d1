"""The Delta sink on Azure, against Azurite, up to the first commit of rows.

Azurite 3.37 lists from the beginning what it was asked to list from a version on (`startFrom`), so
that delta-rs refuses a table with two commits of rows there, whoever wrote them.
"""

import functools
from collections.abc import Iterator
from typing import Any

import pytest
from deltalake import DeltaTable

from tests.delta.delta_sinks import check_epochs_are_there_once
from tests.storage.azurite import ACCOUNT, KEY, Azurite, needs_azurite

pytestmark = needs_azurite


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Azurite]:
    server = Azurite(tmp_path_factory.mktemp("azure"))
    yield server
    server.stop()


def seen(server: Azurite, container: str) -> list[int]:
    """Read the table by delta-rs, with the account's key, which the sink does not know."""
    settings = {
        "azure_storage_account_name": ACCOUNT,
        "azure_storage_account_key": KEY,
        "azure_storage_endpoint": f"http://{server.host}/{ACCOUNT}",
        "allow_http": "true",
    }
    table = DeltaTable(f"az://{container}/out", storage_options=settings)
    return sorted(table.to_pyarrow_table()["n"].to_pylist())


@pytest.mark.parametrize("every", [0, "1 hour"])
def test_epochs_on_azure_are_there_once_whoever_commits_them(
    server: Azurite, monkeypatch: pytest.MonkeyPatch, every: Any
) -> None:
    """A signature in the URI is all that the sink knows."""
    container = f"delta-{len(str(every))}"
    files = server.create_container(container)
    uri = f"abfs://{ACCOUNT}@{container}/out?{server.query}"
    read = functools.partial(seen, server, container)
    check_epochs_are_there_once(monkeypatch, uri, read, files, f"{container}/out", every)
