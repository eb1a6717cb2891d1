"""A checkpoint's files on Azure, against Azurite; and what obstore is told of a URI."""

from pathlib import Path

import pytest

from tallystick.errors import OptionError, StorageError
from tallystick.storage.exclusive import store_settings
from tallystick.storage.file_storage import FileStorage
from tests.storage.azurite import ACCOUNT, KEY, Azurite, needs_azurite

OF_THE_ACCOUNT = {"account_name": "acme"}


@needs_azurite
def test_files_come_back_and_a_name_is_won_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The account's key is for obstore: Azurite removes no batch of objects by a signature."""
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", KEY)
    server = Azurite(tmp_path)
    server.create_container("checkpoints")
    uri = f"abfs://{ACCOUNT}@checkpoints/jobs/one?{server.query}"
    storage = FileStorage(uri)
    storage.put("keyed-state/b", b"0123456789")
    storage.put("keyed-state/a", b"")
    assert storage.get("keyed-state/b") == b"0123456789"
    assert storage.get_range("keyed-state/b", -3, 100) == b"789"
    assert storage.get("none") is None
    assert storage.names("keyed-state") == ["keyed-state/a", "keyed-state/b"]
    assert storage.put_new("decisions/1", b"first")
    assert not storage.put_new("decisions/1", b"second")
    assert storage.get("decisions/1") == b"first"
    assert storage.names("decisions") == ["decisions/1"], "a probe is left"
    assert storage.delete_many(["keyed-state/a", "keyed-state/b"])
    assert storage.names("keyed-state") == []
    server.stop()
    with pytest.raises(StorageError, match="creating decisions/2") as caught:
        storage.put_new("decisions/2", b"")
    assert "sig=" not in str(caught.value)
    assert "sig=" not in storage.location


@pytest.mark.parametrize(
    ("uri", "url", "config"),
    [
        ("abfss://box@acme.dfs.core.windows.net", "abfss://box", OF_THE_ACCOUNT),
        ("abfs://acme@box", "abfs://box", OF_THE_ACCOUNT),
        (
            "abfss://box@acme.dfs.core.chinacloudapi.cn"
            "?dfs_storage_authority=.dfs.core.chinacloudapi.cn"
            "&blob_storage_authority=.blob.core.chinacloudapi.cn",
            "abfss://box",
            {**OF_THE_ACCOUNT, "endpoint": "https://acme.blob.core.chinacloudapi.cn"},
        ),
        (
            "abfs://acme@box?tenant_id=t&client_id=c&client_secret=s",
            "abfs://box",
            {**OF_THE_ACCOUNT, "tenant_id": "t", "client_id": "c", "client_secret": "s"},
        ),
        (
            "abfs://acme@box?enable_tls=false&blob_storage_authority=127.0.0.1:1&sp=r&sig=a%2Fb%3D",
            "abfs://box",
            {
                **OF_THE_ACCOUNT,
                "endpoint": "http://127.0.0.1:1/acme",
                "sas_key": "sp=r&sig=a%2Fb%3D",
            },
        ),
    ],
)
def test_obstore_is_told_what_pyarrow_reads_in_a_uri(
    uri: str, url: str, config: dict[str, str]
) -> None:
    assert store_settings(uri, "")[:2] == (url, config)


@pytest.mark.parametrize(
    "uri", ["abfss://acme.blob.core.windows.net", "abfs://acme@127.0.0.1:10000", "abfs://box"]
)
def test_a_uri_without_an_account_or_container_is_refused(uri: str) -> None:
    with pytest.raises(OptionError, match="expected abfss://container@account"):
        store_settings(uri, "")
