"""What a worker keeps between tasks: each value has one user, and a fork begins with none."""

import os
import subprocess
import sys
import threading

import pytest

from tallystick.host.worker_cache import WorkerCache


class Connection:
    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def cache() -> WorkerCache[str, Connection]:
    return WorkerCache(Connection.close, idle_max=2)


def test_users_of_a_key_share_one_value(cache):
    first = cache.get("a", Connection)

    assert cache.get("a", Connection) is first
    assert cache.get("b", Connection) is not first


def test_threads_that_ask_at_once_share_one_value_and_the_others_are_closed(cache):
    all_are_here, connections, shared_ones = threading.Barrier(4), [], []

    def make() -> Connection:
        all_are_here.wait(10)
        connections.append(Connection())
        return connections[-1]

    threads = [
        threading.Thread(target=lambda: shared_ones.append(cache.get("a", make))) for _ in "1234"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)

    (shared,) = set(shared_ones)
    assert len(shared_ones) == len(connections) == 4
    assert sorted(connection.closed for connection in connections) == [0, 1, 1, 1]
    assert shared.closed == 0


def test_an_idle_value_goes_to_one_user_only(cache):
    first, second = Connection(), Connection()
    assert cache.take("a") is None
    cache.give_back("a", first)
    cache.give_back("a", second)

    assert [cache.take("b"), cache.take("a"), cache.take("a"), cache.take("a")] == [
        *(None, second, first, None)
    ]


def test_above_the_limit_of_a_key_what_is_given_back_is_closed(cache):
    kept, closed = [Connection(), Connection()], Connection()
    for connection in (*kept, closed):
        cache.give_back("a", connection)
    cache.give_back("b", Connection())

    assert [connection.closed for connection in (*kept, closed)] == [0, 0, 1]


def test_closing_forgets_what_matches_even_where_it_fails(cache):
    class Broken(Connection):
        def close(self) -> None:
            super().close()
            raise OSError

    broken, fine, other = Broken(), Connection(), Connection()
    for key, connection in (("a", broken), ("a", fine), ("b", other)):
        cache.give_back(key, connection)

    cache.close(lambda key: key == "a")
    assert [connection.closed for connection in (broken, fine, other)] == [1, 1, 0]
    cache.close()
    assert other.closed == 1
    assert cache.take("a") is cache.take("b") is None


def test_a_fork_neither_uses_nor_closes_what_its_parent_keeps(cache):
    inherited = cache.get("a", Connection)
    child = os.fork()
    if child == 0:
        is_fine = cache.take("a") is None
        cache.close()
        is_fine = is_fine and inherited.closed == 0
        is_fine = is_fine and cache.get("a", Connection) is not inherited
        os._exit(0 if is_fine else 1)

    assert os.waitpid(child, 0)[1] == 0
    assert cache.get("a", Connection) is inherited


def test_a_fork_while_a_thread_uses_the_cache_does_not_hang(cache):
    """The thread is not in the child: nobody would release the lock that it holds."""
    lock, _ = cache._of_this_process()
    with lock:
        child = os.fork()
        if child == 0:
            cache.give_back("a", Connection())
            os._exit(0)

    assert os.waitpid(child, 0)[1] == 0


EXIT = """
import os
from tallystick.host.worker_cache import WorkerCache

cache = WorkerCache(lambda value: print(value, flush=True))
cache.give_back("a", "the parent's")
if os.fork() == 0:
    cache.give_back("a", "the child's")
else:
    os.wait()
"""


def test_at_its_exit_a_process_closes_what_is_its_own():
    done = subprocess.run([sys.executable, "-c", EXIT], capture_output=True, text=True, check=True)

    assert done.stdout.splitlines() == ["the child's", "the parent's"]
