"""The object store with a program's checkpoint, behind a proxy that can be cut."""

import os
import uuid
from urllib.parse import urlsplit

from tallystick.errors import OptionError
from tallystick.testing.process import free_ports
from tallystick_tools.chaos.proxy import HOST, Proxies

ENDPOINT_VARIABLE = "AWS_ENDPOINT_URL_S3"
DEFAULT_PORT = 80


class ObjectStore:
    """An object store for one run; an environment variable leads the program to it.

    Args:
        uri: `s3://bucket/folder`, below which the run has a checkpoint of its own.

    Raises:
        OptionError: The variable does not name an endpoint without TLS: no proxy can stand before
            another one.
    """

    def __init__(self, uri: str) -> None:
        named = os.environ.get(ENDPOINT_VARIABLE, "")
        endpoint = urlsplit(named)
        if endpoint.scheme != "http" or not endpoint.hostname:
            raise OptionError(
                f"a checkpoint in {uri} needs {ENDPOINT_VARIABLE}=http://host:port, found "
                f"{named!r}: the program is led to it through a proxy, which cannot be put before "
                f"an endpoint with TLS"
            )
        (port,) = free_ports(1, HOST)
        target = endpoint.hostname, endpoint.port or DEFAULT_PORT
        self.proxy = Proxies([port], [target], is_kafka=False)
        self.checkpoint = f"{uri.rstrip('/')}/{uuid.uuid4().hex}"
        self.environment = {ENDPOINT_VARIABLE: f"http://{HOST}:{port}"}

    def close(self) -> None:
        """Close the proxy; the objects of the run stay."""
        self.proxy.close()
