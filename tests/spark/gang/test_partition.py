"""A host that is out of reach: its member is in a network of its own, whose cable is pulled.

Needs the right to make networks, on Linux; nobody's own network is touched.
"""

import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Iterator

import pytest

from tallystick.spark.gang import gang as gangs
from tallystick.spark.gang.gang import GangLostError, Size
from tests.spark.gang.forked import Reading, end, gang_of, order, wait_until_gone
from tests.spark.mischief import is_gone

HERE, THERE = "198.51.100.1", "198.51.100.2"
NEW_NETWORK = 0x40000000
SHARES = ((0, 2), (1, 3))

pytestmark = pytest.mark.timeout(120)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def elsewhere() -> Iterator[str]:
    """A network with one cable to this one; its name."""
    name = f"tally{os.getpid() % 10_000}"
    try:
        ip("netns", "add", name)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no right to make networks here")
    try:
        ip("link", "add", f"{name}a", "type", "veth", "peer", "name", f"{name}b")
        ip("link", "set", f"{name}b", "netns", name)
        ip("addr", "add", f"{HERE}/30", "dev", f"{name}a")
        ip("link", "set", f"{name}a", "up")
        ip("-n", name, "addr", "add", f"{THERE}/30", "dev", f"{name}b")
        ip("-n", name, "link", "set", f"{name}b", "up")
        yield name
    finally:
        subprocess.run(["ip", "link", "del", f"{name}a"], capture_output=True)
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.mark.skipif(not shutil.which("ip"), reason="needs iproute2")
@pytest.mark.parametrize("does", ["waits", "sends"])
def test_a_member_out_of_reach_is_missed_in_seconds_and_ends_itself(
    elsewhere: str, monkeypatch: pytest.MonkeyPatch, does: str
) -> None:
    """Also while the other member has sent to it what nobody acknowledges."""
    monkeypatch.setattr(gangs, "_addresses", lambda context: (HERE, HERE))

    def move(task: int) -> None:
        if task == 1:
            with open(f"/run/netns/{elsewhere}") as network:
                assert ctypes.CDLL(None).setns(network.fileno(), NEW_NETWORK) == 0

    gang = gang_of(Size(2), begin=move)
    here, there = gang.pids[0], gang.pids[1]

    def act(number: int) -> None:
        if number == 0:
            ip("-n", elsewhere, "link", "set", f"{elsewhere}b", "down")
        if does == "waits" or os.getpid() == there:
            time.sleep(1000)

    try:
        began_s = time.monotonic()
        with pytest.raises(GangLostError):
            gang.run(order(1, SHARES, reading=Reading(act), size=1 << 20))
        assert 2 < time.monotonic() - began_s < 30
        wait_until_gone([here, there])
        assert is_gone(there)
    finally:
        gang.give_up()
        end([here, there])
