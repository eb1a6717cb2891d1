"""Azurite, Microsoft's emulator of Azure's object store, as a process for tests."""

import base64
import hashlib
import hmac
import shutil
import time
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlencode

import pytest
from pyarrow import fs

from tallystick.testing.process import ProcessGroup, free_ports

ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The key that every Azurite has, so no secret."""
READY_S = 60

needs_azurite = pytest.mark.skipif(
    shutil.which("azurite-blob") is None,
    reason="npm install --global azurite: azurite-blob is not found",
)


class Azurite:
    """A server in a process of its own; it refuses what is not signed."""

    def __init__(self, folder: Path) -> None:
        (port,) = free_ports(1, "127.0.0.1")
        self.host = f"127.0.0.1:{port}"
        self.log = folder / "requests.log"
        self.group = ProcessGroup()
        where = ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(folder)]
        # The clients' versions of the protocol are newer than the server, which refuses them else.
        options = ["--skipApiVersionCheck", "--disableTelemetry"]
        self.process = self.group.spawn(["azurite-blob", *where, *options], self.log)
        deadline = time.monotonic() + READY_S
        while not self.answers():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)

    def answers(self) -> bool:
        try:
            urllib.request.urlopen(f"http://{self.host}/", timeout=5).close()
        except urllib.error.HTTPError:
            return True
        except OSError:
            return False
        return True

    @property
    def query(self) -> str:
        """The options of a URI, with a shared access signature for all of the account."""
        places = {"blob_storage_authority": self.host, "dfs_storage_authority": self.host}
        return urlencode({**places, "enable_tls": "false", **signature()})

    def create_container(self, name: str) -> fs.AzureFileSystem:
        """Create a container; return an independent view of the server, by the account's key."""
        files = fs.AzureFileSystem(
            ACCOUNT,
            account_key=KEY,
            blob_storage_authority=self.host,
            dfs_storage_authority=self.host,
            blob_storage_scheme="http",
            dfs_storage_scheme="http",
        )
        files.create_dir(name)
        return files

    def stop(self) -> None:
        self.group.close()
        self.process.wait()


def signature() -> dict[str, str]:
    """Return a shared access signature of an account, as Azure's documentation builds it."""
    rights = {"sp": "rwdlacup", "ss": "b", "srt": "sco", "st": "", "se": "2099-01-01T00:00:00Z"}
    signed = {**rights, "sip": "", "spr": "https,http", "sv": "2021-12-02", "ses": ""}
    text = "\n".join([ACCOUNT, *signed.values(), ""])
    digest = hmac.new(base64.b64decode(KEY), text.encode(), hashlib.sha256).digest()
    filled = {name: value for name, value in signed.items() if value}
    return {**filled, "sig": base64.b64encode(digest).decode()}
