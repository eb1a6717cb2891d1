"""The clients of a worker process: they outlive its tasks, so connections do too."""

import gc
import threading

from tallystick.host.worker_cache import WorkerCache
from tallystick.kafka.client import Client
from tallystick.kafka.config import KafkaConfig

_clients: WorkerCache[tuple[int, KafkaConfig], Client] = WorkerCache(Client.close)


def client_for(config: KafkaConfig) -> Client:
    """Return the thread's client of a cluster; never one that was made before a fork.

    Args:
        config: how the cluster is reached.
    """

    def make() -> Client:
        client = Client(config)
        # Spark's daemon has each worker collect garbage after every task, which visits all objects
        # of all modules: 35 to 70 ms. What was loaded by now stays, and need not be visited again.
        gc.collect()
        gc.freeze()
        return client

    return _clients.get((threading.get_ident(), config), make)
