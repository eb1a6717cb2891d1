"""A look at a standalone master before the JVM asks for it, a minute long and in a page of Java."""

import socket

from tallystick.kafka.outages import is_hopeless, reason_of, unreachable

SCHEME = "spark://"
PATIENCE_S = 3.0


def check_master(master: str) -> None:
    """Raise if no standalone master of a URL can be reached; other kinds of masters are passed.

    Args:
        master: as Spark takes it, such as `spark://a:7077,b:7077`, or `local[2]`.

    Raises:
        OptionError: every host refuses connections, or has a name that does not resolve.
    """
    if not master.startswith(SCHEME):
        return
    reasons = {}
    for address in master.removeprefix(SCHEME).split(","):
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            return  # Spark refuses it in its own words
        try:
            socket.create_connection((host, int(port)), PATIENCE_S).close()
        except OSError as error:
            if not is_hopeless(error):
                return
            reasons[address] = reason_of(error)
        else:
            return
    raise unreachable(f"The Spark master {master}", reasons, "the master")
