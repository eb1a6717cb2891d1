"""The Storage port: a checkpoint location on a local disk or an object store.

A file appears whole or not at all, and is durable when `put` returns. On a local disk that takes a
temporary file, fsync, a rename, and an fsync of the folder. Object stores do so by themselves: an
upload counts when it is completed, and a failed upload never is. `put_new` decides between writers:
by a hard link on a local disk, by a conditional request on object stores (see `exclusive`).

On S3, Spark's part of a checkpoint goes through Hadoop (`s3a://bucket/path`, with `fs.s3a.…` in
Spark's configuration), ours through pyarrow, at the same place. pyarrow does not see Hadoop's
settings: give credentials, region and endpoint where both read them: AWS's environment variables
(`AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_SESSION_TOKEN`, `AWS_REGION`,
`AWS_ENDPOINT_URL_S3`) or the machine's role, on the driver and on the executors. Where Spark is not
involved (the place of a savepoint), the URI's query may carry pyarrow's options:
`s3://bucket/path?region=eu-central-1&endpoint_override=host:9000&scheme=http`.

Invariant: a path, whatever its text, leads to a file below the folder or is refused, and nothing is
written or removed through a symbolic link in it.
"""

import contextlib
import logging
import os
import re
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import quote, unquote

from pyarrow import fs

from tallystick.errors import ManifestError, OptionError, StorageError
from tallystick.storage.exclusive import ExclusiveStore
from tallystick.storage.local_files import fsync_folder, link_between, put_local, put_new_local
from tallystick.storage.places import HADOOPS_SCHEMES, Place, resolved

logger = logging.getLogger(__name__)

_WAY_OUT = (
    "or have a KafkaSink with transactions='epoch' in the pipeline, which decides in Kafka instead"
)
DELETES_AT_A_TIME = 16
"""An object store takes some 30 ms for each file that is removed."""


class FileStorage:
    """Files below one folder.

    Args:
        place: a path, or a URI as Spark knows it (`file:`, `s3a:`, `gs:`, `abfss:`). As for
            Spark, `%20` and the like are no escapes, except after `file://`.

    Raises:
        OptionError: see `places.resolved`.
    """

    def __init__(self, place: Place) -> None:
        self._uri = resolved(place)
        self._location = shown(self._uri)
        self._query = "" if _is_local(self._uri) else self._uri.partition("?")[2]
        self._root = _root(self._uri)
        self._exclusive: ExclusiveStore | None = None
        self._synced: set[Path] = set()  # folders whose names are durable already

    def __repr__(self) -> str:
        return f"FileStorage({self._location!r})"

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return FileStorage, (self._uri,)

    @property
    def uri(self) -> str:
        """The place as other processes reach it: as `location`, with credentials and options."""
        return self._uri

    @property
    def location(self) -> str:
        """The URI that paths are relative to, without credentials and options."""
        return self._location

    def put(self, path: str, data: bytes) -> None:
        """Write a new file, atomically and durably.

        Raises:
            StorageError: the write failed; nothing of the file is visible under its name.
            OptionError: a symbolic link is in its way.
            ManifestError: the path leads out of the folder.
        """
        try:
            place = self._changed_place(path)
            if isinstance(place, Path):
                put_local(place, data)
            else:
                files, whole = place
                with files.open_output_stream(whole) as stream:
                    stream.write(data)
        except OSError as error:
            raise StorageError(
                f"checkpoint {self._location}: writing {path} ({len(data)} bytes) failed: {error}. "
                f"Nothing was committed. Make room or give access, then start again."
            ) from error

    def put_new(self, path: str, data: bytes) -> bool:
        """Write a file that must not exist yet; return False, and change nothing, if it does.

        Raises:
            StorageError: the request failed; whether the file exists is unknown.
            OptionError: this kind of storage cannot decide between two writers, obstore is
                missing, or a symbolic link is in its way.
            ManifestError: the path leads out of the folder.
        """
        try:
            place = self._changed_place(path)
            if isinstance(place, Path):
                return put_new_local(place, data)
            files, key = place
            key = key.partition("/")[2]  # without the bucket
            return self._object_store(files).create(key, data)
        except OSError as error:
            raise StorageError(
                f"checkpoint {self._location}: creating {path} ({len(data)} bytes) failed: "
                f"{without_secrets(str(error), self._uri)}. Whether it was created is unknown. "
                f"Make room or give access, then start again."
            ) from None

    def _object_store(self, files: fs.FileSystem) -> ExclusiveStore:
        """Return the client for the requests to an object store that pyarrow lacks."""
        if self._exclusive is not None:
            return self._exclusive
        bucket = self._location.partition("://")[2].partition("/")[0]  # or container
        uri = f"{scheme_of(self._location)}://{user_part(self._uri)}{bucket}?{self._query}"
        region = files.region if isinstance(files, fs.S3FileSystem) else ""
        self._exclusive = ExclusiveStore(uri, f"checkpoint {self._location}", _WAY_OUT, region)
        return self._exclusive

    def get(self, path: str) -> bytes | None:
        """Read a whole file; None if there is none."""
        content: bytes | None = None
        with self._reading(path, "reading") as place:
            if isinstance(place, Path):
                content = place.read_bytes()
            else:
                files, whole = place
                with files.open_input_stream(whole) as stream:
                    content = bytes(stream.read())
        return content

    def get_range(self, path: str, offset: int, length: int) -> bytes | None:
        """Read a part of a file; None if there is none. See `ports.Storage.get_range`."""
        content: bytes | None = None
        with self._reading(path, f"reading {length} bytes of") as place:
            files, whole = _reached(place)
            with files.open_input_file(whole) as file:
                size = file.size()
                start = min(offset, size) if offset >= 0 else max(0, size + offset)
                content = bytes(file.read_at(max(0, min(length, size - start)), start))
        return content

    def written_ms(self, path: str) -> int | None:
        """Return the time of a file's last write, in ms since 1970; None: there is no file."""
        time_ms: int | None = None
        with self._reading(path, "looking at") as place:
            files, whole = _reached(place)
            written_ns = files.get_file_info(whole).mtime_ns
            time_ms = None if written_ns is None else written_ns // 1_000_000
        return time_ms

    def names(self, folder: str) -> list[str]:
        """Return the sorted paths of a folder's files ("": the root's); none if it is missing."""
        names: list[str] = []
        with self._reading(folder, "listing") as place:
            if isinstance(place, Path):
                names = [entry.name for entry in os.scandir(place)]
            else:
                files, whole = place
                selector = fs.FileSelector(whole, allow_not_found=True)
                names = [info.base_name for info in files.get_file_info(selector)]
        prefix = f"{folder}/" if folder else ""
        return sorted(f"{prefix}{name}" for name in names if not name.startswith("."))

    def delete(self, path: str) -> None:
        """Remove a file; nothing happens if there is none.

        Raises:
            OptionError: a symbolic link is in its way.
            ManifestError: the path leads out of the folder.
        """
        with self._reading(path, "removing"):
            place = self._changed_place(path)
            if isinstance(place, Path):
                place.unlink()
            else:
                files, whole = place
                files.delete_file(whole)

    def delete_many(self, paths: Sequence[str]) -> bool:
        """Remove files with as few requests as the storage allows; see `ports.DeletesMany`."""
        if isinstance(self._root, Path):
            for path in paths:
                self.delete(path)
            return True
        files, _ = self._root
        places = [self._changed_place(path) for path in paths]
        keys = [_reached(place)[1].partition("/")[2] for place in places]  # without the bucket
        try:
            self._object_store(files).delete_many(keys)
        except Exception as error:  # it is missing, or has not the credentials that pyarrow has
            shown_error = without_secrets(str(error), self._uri)
            logger.info("checkpoint %s: removing one by one: %s", self._location, shown_error)
            return False
        return True

    def sync(self, path: str) -> None:
        """Make a file on a local disk durable, with its name and its parent folders.

        On an object store every file is durable already. A missing file is no error.
        """
        with self._reading(path, "syncing") as place:
            if not isinstance(place, Path):
                return
            with open(place, "rb") as file:
                os.fsync(file.fileno())
            fsync_folder(place.parent)
            for folder in place.parent.parents:
                if folder in self._synced:
                    break
                self._synced.add(folder)
                with contextlib.suppress(PermissionError):  # not ours, so nor is its name new
                    fsync_folder(folder)

    def _place(self, path: str) -> "_FilePlace":
        if _leads_out(path):
            raise ManifestError(
                f"checkpoint {self._location}: path {path!r} leads out of the folder, or nowhere, "
                f"as none of ours does: what names it was edited, or made by somebody else. "
                f"Nothing was changed."
            )
        root = self._root
        if not path:
            return root
        return root / path if isinstance(root, Path) else (root[0], f"{root[1]}/{path}")

    def _changed_place(self, path: str) -> "_FilePlace":
        """Return the place of a file that is to be written or removed."""
        place = self._place(path)
        if isinstance(place, Path) and isinstance(self._root, Path):
            link = link_between(self._root, place)
            if link is not None:
                raise OptionError(
                    f"checkpoint {self._location}: {link} is a symbolic link, and nothing is "
                    f"written or removed through one: whoever made the folder may have aimed it at "
                    f"other files. Put the folder itself there."
                )
        return place

    @contextlib.contextmanager
    def _reading(self, path: str, doing: str) -> Iterator["_FilePlace"]:
        """Yield a file's place; a missing file is no error, any other failure a StorageError."""
        try:
            yield self._place(path)
        except (FileNotFoundError, NotADirectoryError):  # below a file there is none either
            return
        except OSError as error:
            raise StorageError(
                f"checkpoint {self._location}: {doing} {path} failed: {error}"
            ) from error


class SystemClock:
    """The Clock port."""

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)

    def nonce(self) -> str:
        """Return a name that no other run will draw."""
        return uuid.uuid4().hex[:16]


SYSTEM_CLOCK = SystemClock()

_FilePlace = Path | tuple[fs.FileSystem, str]
"""A local path, or a file system and a path in it."""


def shown(place: Place) -> str:
    """Return a location without possible secrets: the access key before the host, and options.

    A location on a local disk is shown as the whole path, so that no two folders share a name.
    """
    try:
        uri = resolved(place)
    except OptionError:  # who uses it refuses it
        uri = str(place)
        if "://" not in uri and "@" in uri:  # it may be an object store's, but for a slash
            return f"{uri.partition(':')[0]}:…{uri.partition('?')[0].rpartition('@')[2]}"
    if _is_local(uri):
        return uri
    scheme, _, rest = uri.partition("?")[0].partition("://")
    return f"{scheme}://{rest[_secret_length(rest, scheme) :]}".rstrip("/")


def _secret_length(rest: str, scheme: str) -> int:
    """Return the length of a key and its secret before the host; AWS's may hold a slash."""
    authority = rest.partition("/")[0]
    if scheme in ("abfs", "abfss") and ":" not in authority.partition("@")[0]:
        return 0  # the container
    if "@" in authority:
        return authority.rindex("@") + 1
    _, colon, port = authority.rpartition(":")
    is_port = port.isdecimal() and HADOOPS_SCHEMES.get(scheme, scheme) != "s3"  # a bucket has none
    return rest.rfind("@") + 1 if colon and not is_port else 0


def without_secrets(text: str, uri: str) -> str:
    """Return an error's text about a URI, without the parts of the URI that `shown` leaves out."""
    base, _, query = uri.partition("?")
    scheme, _, rest = base.partition("://")
    options = [value for _, _, value in (option.partition("=") for option in query.split("&"))]
    secrets = [*re.split("[:/@]", rest[: _secret_length(rest, scheme)]), *options]
    for secret in sorted({secret for secret in secrets if secret}, key=len, reverse=True):
        for form in (secret, unquote(secret)):
            text = text.replace(form, "…")
    return text


def _leads_out(path: str) -> bool:
    try:
        os.fsencode(path)  # names that a local disk listed are bytes of any kind
    except UnicodeEncodeError:
        return True
    is_whole = path.startswith(("/", "file:")) or "://" in path
    return is_whole or "\0" in path or ".." in path.replace("\\", "/").split("/")


def scheme_of(uri: str) -> str:
    """Return the scheme of a URI as pyarrow names it: s3 for Hadoop's s3a."""
    scheme = uri.partition("://")[0]
    return HADOOPS_SCHEMES.get(scheme, scheme)


def _reached(place: _FilePlace) -> tuple[fs.FileSystem, str]:
    return (fs.LocalFileSystem(), str(place)) if isinstance(place, Path) else place


def user_part(uri: str) -> str:
    """Return the URI's part before the host, with the @: an access key and its secret, or ""."""
    scheme, _, rest = uri.partition("?")[0].partition("://")
    return rest[: _secret_length(rest, scheme)]


def reach(uri: str, what: str) -> tuple[fs.FileSystem, str]:
    """Return the file system of a resolved place, and the path in it.

    Args:
        uri: as `resolved` returned it.
        what: names the setting that holds the URI, in errors.

    Raises:
        OptionError: pyarrow cannot open the URI.
    """
    return _reached(_root(uri, what))


def _is_local(uri: str) -> bool:
    return "://" not in uri or uri.startswith("/")


def _root(uri: str, what: str = "checkpoint location") -> _FilePlace:
    if _is_local(uri):
        return Path(uri)
    scheme, _, rest = uri.partition("://")
    if _secret_length(rest.partition("?")[0], scheme) > len(rest.partition("/")[0]):
        raise OptionError(
            f"{what} {shown(uri)}: the secret before the host has a slash, which ends "
            f"the host. Write it as %2F; or give it by environment variables."
        )
    scheme = HADOOPS_SCHEMES.get(scheme, scheme)
    base, mark, options = rest.partition("?")
    host, slash, path = base.partition("/")
    rest = f"{host}{slash}{quote(path)}{mark}{options}"  # to Hadoop each character is itself
    if scheme == "s3" and "allow_delayed_open" not in rest:
        rest += ("&" if "?" in rest else "?") + "allow_delayed_open=true"  # one request, not three
    try:
        files, root = fs.FileSystem.from_uri(f"{scheme}://{rest}")
    except Exception as error:
        reason = without_secrets(str(error), uri)
        raise OptionError(
            f"{what} {shown(uri)}: expected a URI of {scheme} that pyarrow can open: {reason}"
        ) from None
    return files, root.rstrip("/")
