"""The page of a pipeline in the same process: `Pipeline.start(ui_port=...)`."""

import threading
from collections.abc import Mapping

from tallystick.errors import OptionError
from tallystick.ops.ui.page import CheckpointReader, LiveRun
from tallystick.ops.ui.server import Server, Source

_servers: dict[int, Server] = {}
"""By port. A page outlives its query, to show why that ended; the next start takes the port."""
_lock = threading.Lock()


def open_page(port: int, checkpoint: str, options: Mapping[str, str], live: LiveRun) -> None:
    """Serve the page of a run.

    Args:
        port: of this machine.
        checkpoint: the pipeline's.
        options: of the connection to the cluster that decides, with Kafka's names.
        live: the facts about the run.

    Raises:
        OptionError: there is no such port, or another program has it.
    """
    if not 0 < port < 65536:
        raise OptionError(f"ui_port={port}: expected 1 to 65535, for example 4050")
    source = Source(CheckpointReader(checkpoint, options).read, live.add_to)
    with _lock:
        if (server := _servers.get(port)) is not None:
            server.source = source
            return
        server = _servers[port] = Server(source, port)
        server.start()
