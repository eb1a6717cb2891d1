"""The clients of a worker process: they outlive its tasks, so connections do too."""

import gc
import os
import threading

from tallystick.kafka.client import Client
from tallystick.kafka.config import KafkaConfig

_clients: dict[tuple[int, int, KafkaConfig], Client] = {}


def client_for(config: KafkaConfig) -> Client:
    """Return the thread's client of a cluster; never one that was made before a fork.

    Args:
        config: how the cluster is reached.
    """
    key = (os.getpid(), threading.get_ident(), config)
    if key not in _clients:
        _clients[key] = Client(config)
        # Spark's daemon has each worker collect garbage after every task, which visits all objects
        # of all modules: 35 to 70 ms. What was loaded by now stays, and need not be visited again.
        gc.collect()
        gc.freeze()
    return _clients[key]
