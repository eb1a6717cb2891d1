"""A first look at a cluster, for a pipeline that never ran: no answer ends the start."""

import socket
import time

from tallystick.kafka import protocol
from tallystick.kafka.config import KafkaConfig
from tallystick.kafka.connection import Network
from tallystick.kafka.outages import LOOKUP_TRIES_S, is_hopeless, reason_of, unreachable

PATIENCE_S = 3.0
"""The longest time for the answer of each server; the usual tries go on after that."""
LOOKUP_PAUSE_S = 0.3


def check_reachable(config: KafkaConfig) -> None:
    """Raise if no server of a cluster can be reached, and waiting will not mend that.

    Raises:
        OptionError: every server refuses connections, has a name that does not resolve, or speaks
            another protocol; or, with its own message, one refuses the login or the certificate.
    """
    until_s = time.monotonic() + LOOKUP_TRIES_S
    while reasons := _hopeless(config):
        is_lookup = all(
            isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN
            for error in reasons.values()
        )
        if not is_lookup or time.monotonic() > until_s:
            texts = {server: reason_of(error) for server, error in reasons.items()}
            setting = "bootstrap_servers"
            if any("security.protocol" in text for text in texts.values()):
                setting = f"security.protocol, which is {config.security_protocol}"
            raise unreachable(f"Kafka at {config.bootstrap_servers}", texts, setting)
        time.sleep(LOOKUP_PAUSE_S)


def _hopeless(config: KafkaConfig) -> dict[str, OSError]:
    """Return the failures of all servers; none if one answers, or may soon."""
    network, failures = Network(config), dict[str, OSError]()
    try:
        for node, address in network.bootstrap.items():
            try:
                network.ask(node, protocol.MetadataRequest(topics=[]), _until())
            except OSError as error:
                if not is_hopeless(error):
                    return {}
                failures[address] = error
            else:
                return {}
    finally:
        network.close()
    return failures


def _until() -> float:
    return time.monotonic() + PATIENCE_S
