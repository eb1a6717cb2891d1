"""An object store behind a proxy: found by the variable, cut and mended, with TLS refused."""

import pytest

from tallystick.errors import OptionError, TallystickError
from tallystick.storage.file_storage import FileStorage
from tallystick_tools.chaos.object_store import ENDPOINT_VARIABLE, ObjectStore
from tallystick_tools.chaos.schedule import kinds_for
from tests.storage.test_storage_s3 import Server


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("s3"))
    server.create_bucket("bucket", access_key="key", secret_key="secret")
    yield server
    server.stop()


def test_a_program_reaches_the_store_until_it_is_cut_and_again_after(server, monkeypatch):
    monkeypatch.setenv(ENDPOINT_VARIABLE, f"http://{server.host}")
    store = ObjectStore("s3://bucket/chaos")
    endpoint = store.environment[ENDPOINT_VARIABLE].removeprefix("http://")
    query = f"?endpoint_override={endpoint}&scheme=http&region=us-east-1"
    through = FileStorage(f"s3://key:secret@bucket{query}")
    direct = FileStorage(f"s3://key:secret@bucket?{server.query}")
    try:
        through.put("chaos/one", b"1")
        assert direct.get("chaos/one") == b"1"
        store.proxy.cut(0)
        with pytest.raises(TallystickError):
            through.put("chaos/two", b"2")
        assert store.proxy.refused(0) > 0
        assert direct.get("chaos/two") is None
        store.proxy.mend(0)
        through.put("chaos/three", b"3")
        assert direct.get("chaos/three") == b"3"
    finally:
        store.close()


def test_each_run_has_a_checkpoint_of_its_own(server, monkeypatch):
    monkeypatch.setenv(ENDPOINT_VARIABLE, f"http://{server.host}")
    one, two = ObjectStore("s3://bucket/chaos"), ObjectStore("s3://bucket/chaos")
    one.close(), two.close()
    assert one.checkpoint.startswith("s3://bucket/chaos/")
    assert one.checkpoint != two.checkpoint


@pytest.mark.parametrize("endpoint", ["", "https://s3.example.org", "s3.example.org:9000"])
def test_an_endpoint_that_no_proxy_can_stand_before_is_refused(monkeypatch, endpoint):
    monkeypatch.setenv(ENDPOINT_VARIABLE, endpoint)
    with pytest.raises(OptionError, match=f"{ENDPOINT_VARIABLE}=http://host:port, found"):
        ObjectStore("s3://bucket/chaos")


def test_without_one_its_fault_is_refused():
    with pytest.raises(OptionError, match="needs a --checkpoint in an object store"):
        kinds_for(1, ["object-store"], False)
