"""Two requests that pyarrow lacks on object stores: create exclusively, and delete many objects.

An object that must not exist yet is created by one conditional request, through obstore (extra
`object-store`): with `If-None-Match: *` (S3, Azure) or `x-goog-if-generation-match: 0` (Google), by
the same URI and the same environment variables as pyarrow. obstore does not read the profiles in
`~/.aws`.

Each request is sent only once: after a lost answer, a repeated request would be told "exists" about
the object of the first. And a "no" is followed by a look: S3 says 409 also where a deletion was in
the way and nothing exists, and obstore reports that as "exists".
"""

import contextlib
import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from tallystick.errors import OptionError
from tallystick.host.installed import pip_install

REQUEST_TIMEOUT = timedelta(seconds=30)
"""The wait for an answer; after it, whether the object was created is unknown."""

SCHEMES = {"s3", "gs", "gcs", "abfs", "abfss"}
"""Object stores that are supported, as pyarrow calls them: they create conditionally."""

_SCHEMES = {"gcs": "gs"}
"""Schemes that obstore and pyarrow name differently, by pyarrow's name."""


class ExclusiveStore:
    """Creates objects in one bucket.

    Args:
        uri: of any object or folder in the bucket, with options and credentials as pyarrow reads
            them.
        name: of what lies there, for errors.
        way_out: what may be done where an object cannot be created exclusively, from "or" on.
        region: of an S3 bucket; "" leaves it to the environment.

    Raises:
        OptionError: obstore is missing.
    """

    def __init__(self, uri: str, name: str, way_out: str, region: str = "") -> None:
        scheme = urlsplit(uri).scheme
        assert scheme in SCHEMES, scheme
        try:
            import obstore
            from obstore.store import from_url
        except ImportError:
            raise OptionError(
                f"{name}: a file that must be new is needed here, and pyarrow cannot "
                f"create one exclusively on {scheme}: {pip_install('object-store')} "
                f"(obstore), {way_out}."
            ) from None
        bucket, config, client = store_settings(uri, region)
        self._name, self._way_out = name, way_out
        self._obstore: Any = obstore
        self._store = from_url(
            bucket, config=config, client_options=client, retry_config={"max_retries": 0}
        )
        self._is_proved = False

    def create(self, key: str, data: bytes) -> bool:
        """Create an object; return False, and change nothing, if the key is taken.

        Raises:
            OptionError: the store ignores the condition.
            OSError: the request failed; whether the object was created is unknown.
        """
        if not self._is_proved:
            self._prove(key)
        return self._create(key, data)

    def delete_many(self, keys: Sequence[str]) -> None:
        """Remove objects, a thousand per request where the store offers that (S3).

        Raises:
            OSError: a request failed; some objects may be gone.
        """
        try:
            self._obstore.delete(self._store, list(keys))
        except FileNotFoundError:  # it is gone, which others need not be
            for key in keys:
                with contextlib.suppress(FileNotFoundError):
                    self._obstore.delete(self._store, key)
        except self._obstore.exceptions.BaseError as error:
            raise _as_os_error(error) from None

    def _prove(self, key: str) -> None:
        """Check that the store creates conditionally; on some stores, two writers win."""
        probe = f"{key}.{uuid.uuid4().hex[:8]}.probe"
        results = [self._create(probe, b""), self._create(probe, b"")]
        self.delete_many([probe])
        if results != [True, False]:
            raise OptionError(
                f"{self._name}: this store overwrites where it was asked to create "
                f"(PUT with If-None-Match: * succeeded twice on one name). Use a release of it "
                f"that supports conditional writes, or another place, {self._way_out}."
            )
        self._is_proved = True

    def _create(self, key: str, data: bytes) -> bool:
        exceptions = self._obstore.exceptions
        try:
            self._obstore.put(self._store, key, data, mode="create", use_multipart=False)
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
            self._look(key)
            return False
        except (exceptions.BaseError, OSError) as error:
            raise _as_os_error(error) from None
        return True

    def _look(self, key: str) -> None:
        try:
            self._obstore.head(self._store, key)
        except FileNotFoundError:
            raise OSError("another request for the same name was in the way") from None
        except self._obstore.exceptions.BaseError as error:
            raise _as_os_error(error) from None


def _as_os_error(error: Exception) -> OSError:
    """Return an OSError with an error's first line; the rest is the request, in all its details."""
    return OSError(f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}")


def store_settings(uri: str, region: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Return a bucket's URL, obstore's configuration and its client options, from a pyarrow URI."""
    parts = urlsplit(uri)
    options = dict(parse_qsl(parts.query))
    user, at, host = parts.netloc.rpartition("@")
    client: dict[str, Any] = {"timeout": REQUEST_TIMEOUT, "allow_http": True}
    if "tls_ca_file_path" in options:
        with open(options["tls_ca_file_path"], "rb") as file:
            client["root_certificate"] = file.read()
    if parts.scheme in ("abfs", "abfss"):
        container, settings = _azure_settings(user.partition(":")[0], host, options)
        return f"{parts.scheme}://{container}", settings, client
    if parts.scheme != "s3":
        return f"{_SCHEMES.get(parts.scheme, parts.scheme)}://{parts.netloc}", {}, client
    config: dict[str, Any] = {"conditional_put": "etag"}
    if at:
        key, _, secret = user.partition(":")
        config |= {"access_key_id": unquote(key), "secret_access_key": unquote(secret)}
    if options.get("region") or region:
        config["region"] = options.get("region") or region
    if "endpoint_override" in options:
        endpoint = options["endpoint_override"]
        scheme = options.get("scheme", "https")
        config["endpoint"] = endpoint if "://" in endpoint else f"{scheme}://{endpoint}"
    return f"s3://{host}", config, client


def _azure_settings(user: str, host: str, options: dict[str, str]) -> tuple[str, dict[str, Any]]:
    """Return a container, and obstore's configuration, from what pyarrow reads in a URI of Azure.

    Raises:
        OptionError: the URI names no account, or the container only behind the host.
    """
    blob = options.pop("blob_storage_authority", "")
    dfs = options.pop("dfs_storage_authority", ".dfs.core.windows.net")
    tls = options.pop("enable_tls", "true") not in ("false", "0")
    account, container = user, host
    if dfs.startswith(".") and host.endswith(dfs):
        account, container = host.removesuffix(dfs), user
    if not account or not container or "." in container or ":" in container:
        raise OptionError(
            f"abfss://{user}{'@' if user else ''}{host}: it says no account, or no container "
            f"before the path: expected abfss://container@account.dfs.core.windows.net/path or "
            f"abfss://account@container/path"
        )
    config = {"account_name": account}
    if blob or not tls:
        blob = blob or ".blob.core.windows.net"
        place = f"{account}{blob}" if blob.startswith(".") else f"{blob}/{account}"
        config["endpoint"] = f"http{'s' if tls else ''}://{place}"
    for name in ("tenant_id", "client_id", "client_secret"):
        if name in options:
            config[name] = options.pop(name)
    if "sig" in options:  # of a shared access signature, which covers what else is there
        config["sas_key"] = urlencode(options)
    return container, config
