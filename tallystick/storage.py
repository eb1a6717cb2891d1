"""The Storage port for real: a checkpoint location on any file system that pyarrow reaches.

A file appears whole or not at all, and is durable when `put` returns. On a local disk that takes a
temporary file, fsync, a rename, and an fsync of the folder; object stores do it by themselves: an
upload counts when it is completed, and one that fails is not. `put_new` decides between writers: it
takes a hard link on a local disk, and a conditional request on object stores (see `exclusive`).

On S3, Spark's part of a checkpoint goes through Hadoop (`s3a://bucket/path`, with `fs.s3a.…` in
Spark's configuration), ours through pyarrow, at the same place. pyarrow does not see Hadoop's
settings: give credentials, region and endpoint by what both read, AWS's environment variables
(`AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_SESSION_TOKEN`, `AWS_REGION`,
`AWS_ENDPOINT_URL_S3`) or the machine's role, on the driver and on the executors. Where Spark is not
involved (the place of a savepoint), the URI's query may carry pyarrow's options:
`s3://bucket/path?region=eu-central-1&endpoint_override=host:9000&scheme=http`.
"""

import contextlib
import errno
import os
import re
import time
import uuid
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from urllib.parse import unquote, urlsplit

from pyarrow import fs

from tallystick.errors import OptionError, StorageError
from tallystick.exclusive import ExclusiveStore

DRAFT_UNUSED_S = 24 * 3600
"""An unfinished file of a killed process is removed when it is as old as this."""

DELETES_AT_A_TIME = 16
"""An object store takes some 30 ms for each file that is removed."""

_SCHEMES = {"s3a": "s3", "s3n": "s3"}
"""As pyarrow calls what Hadoop calls otherwise."""

_DRAFT = re.compile(r"\..+\.[0-9a-f]{8}")


class FileStorage:
    """Files below one folder.

    Args:
        uri: a path, or a URI with the schemes that Spark knows (`file:`, `hdfs:`, `s3a:` …).

    Raises:
        OptionError: the URI is of a file system that pyarrow does not know.
    """

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._location = shown(uri)
        self._query = uri.partition("?")[2] if local_path(uri) is None else ""
        self._roots = {self._location: _root(uri)}
        self._exclusive: dict[str, ExclusiveStore] = {}
        self._synced: set[Path] = set()  # folders whose names do not change any more

    def __repr__(self) -> str:
        return f"FileStorage({self._location!r})"

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return FileStorage, (self._uri,)

    @property
    def location(self) -> str:
        """The URI that paths are relative to, without credentials and options."""
        return self._location

    def put(self, path: str, data: bytes) -> None:
        """Write a new file, atomically and durably.

        Raises:
            StorageError: it could not be written; nothing of it is visible under its name.
        """
        try:
            place = self._place(path)
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
        """Write a file that must not exist yet; False, and nothing done, where it does.

        Raises:
            StorageError: it failed; whether the file is there is unknown.
            OptionError: this kind of storage cannot tell two writers apart, or obstore is missing.
        """
        try:
            place = self._place(path)
            if isinstance(place, Path):
                return _put_new_local(place, data)
            store, key = self._exclusive_store(path)
            return store.create(key, data)
        except OSError as error:
            raise StorageError(
                f"checkpoint {self._location}: creating {path} ({len(data)} bytes) failed: "
                f"{without_secrets(str(error), self._uri)}. Whether it was created is unknown. "
                f"Make room or give access, then start again."
            ) from None

    def _exclusive_store(self, path: str) -> tuple[ExclusiveStore, str]:
        """What creates a file that is not on a local disk, and the file's key for it."""
        whole = path if _is_whole(path) else f"{self._location}/{path}"
        scheme, _, rest = whole.partition("://")
        bucket = rest.partition("/")[0]
        files, key = _reached(self._place(path))
        place = f"{_SCHEMES.get(scheme, scheme)}://{bucket}"
        if place not in self._exclusive:
            is_alike = _scheme(whole) == _scheme(self._location)
            user = user_part(self._uri) if is_alike else ""
            uri = f"{_scheme(whole)}://{user}{bucket}?{self._query if is_alike else ''}"
            region = files.region if isinstance(files, fs.S3FileSystem) else ""
            self._exclusive[place] = ExclusiveStore(uri, shown(whole), region)
        return self._exclusive[place], key.partition("/")[2]  # without the bucket, or container

    def get(self, path: str) -> bytes | None:
        """Read a whole file; None if there is none."""
        found: bytes | None = None
        with self._reading(path, "reading") as place:
            if isinstance(place, Path):
                found = place.read_bytes()
            else:
                files, whole = place
                with files.open_input_stream(whole) as stream:
                    found = bytes(stream.read())
        return found

    def get_range(self, path: str, offset: int, length: int) -> bytes | None:
        """Read a part of a file; None if there is none. See `ports.Storage.get_range`."""
        found: bytes | None = None
        with self._reading(path, f"reading {length} bytes of") as place:
            files, whole = _reached(place)
            with files.open_input_file(whole) as file:
                size = file.size()
                start = min(offset, size) if offset >= 0 else max(0, size + offset)
                found = bytes(file.read_at(max(0, min(length, size - start)), start))
        return found

    def names(self, folder: str) -> list[str]:
        """The paths of the files in a folder, sorted; empty if there is no such folder."""
        found: list[str] = []
        with self._reading(folder, "listing") as place:
            if isinstance(place, Path):
                found = [entry.name for entry in os.scandir(place)]
            else:
                files, whole = place
                selector = fs.FileSelector(whole, allow_not_found=True)
                found = [info.base_name for info in files.get_file_info(selector)]
        return sorted(f"{folder}/{name}" for name in found if not name.startswith("."))

    def delete(self, path: str) -> None:
        """Remove a file; nothing happens if there is none."""
        with self._reading(path, "removing") as place:
            if isinstance(place, Path):
                place.unlink()
            else:
                files, whole = place
                files.delete_file(whole)

    def sync(self, path: str) -> None:
        """Make a file on a local disk durable, with its name and the folders that lead to it.

        Elsewhere it is so since it was written. Nothing happens if there is none.
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

    def _place(self, path: str) -> "_Place":
        if not _is_whole(path):
            return _joined(self._roots[self._location], path)
        if path.startswith(f"{self._location}/"):
            return _joined(self._roots[self._location], path[len(self._location) + 1 :])
        folder, _, name = path.rpartition("/")
        if folder not in self._roots:
            # Another place on the same kind of storage is reached in the same way.
            is_alike = self._query and _scheme(folder) == _scheme(self._location)
            self._roots[folder] = _root(f"{folder}?{self._query}" if is_alike else folder)
        return _joined(self._roots[folder], name)

    @contextlib.contextmanager
    def _reading(self, path: str, doing: str) -> Iterator["_Place"]:
        """Where a file lies; that it does not is no error, any other failure is ours."""
        try:
            yield self._place(path)
        except (FileNotFoundError, NotADirectoryError):  # below a file there is none either
            return
        except OSError as error:
            raise StorageError(
                f"checkpoint {self._location}: {doing} {path} failed: {error}"
            ) from error


class SystemClock:
    """The Clock port for real."""

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)

    def nonce(self) -> str:
        """A name that no other run will draw."""
        return uuid.uuid4().hex[:16]


_Place = Path | tuple[fs.FileSystem, str]
"""A local path, or a file system and a path in it."""


def shown(uri: str) -> str:
    """A location without what may be secret: the access key before the host, and options."""
    if local_path(uri) is not None:
        return uri
    scheme, _, rest = uri.partition("?")[0].partition("://")
    return f"{scheme}://{rest[_secret_length(rest, scheme) :]}".rstrip("/")


def _secret_length(rest: str, scheme: str) -> int:
    """How much before the host may be a key and its secret; AWS's often hold a slash."""
    authority = rest.partition("/")[0]
    if scheme in ("abfs", "abfss") and ":" not in authority.partition("@")[0]:
        return 0  # the container
    if "@" in authority:
        return authority.rindex("@") + 1
    _, colon, port = authority.rpartition(":")
    is_port = port.isdecimal() and _SCHEMES.get(scheme, scheme) != "s3"  # a bucket has none
    return rest.rfind("@") + 1 if colon and not is_port else 0


def without_secrets(text: str, uri: str) -> str:
    """An error's text about a URI, without what `shown` leaves out of that."""
    base, _, query = uri.partition("?")
    scheme, _, rest = base.partition("://")
    options = [value for _, _, value in (each.partition("=") for each in query.split("&"))]
    secrets = [*re.split("[:/@]", rest[: _secret_length(rest, scheme)]), *options]
    for secret in sorted({each for each in secrets if each}, key=len, reverse=True):
        for form in (secret, unquote(secret)):
            text = text.replace(form, "…")
    return text


def _is_whole(path: str) -> bool:
    return path.startswith(("/", "file:")) or "://" in path


def _scheme(uri: str) -> str:
    scheme = uri.partition("://")[0]
    return _SCHEMES.get(scheme, scheme)


def _joined(root: _Place, path: str) -> _Place:
    return root / path if isinstance(root, Path) else (root[0], f"{root[1]}/{path}")


def _reached(place: _Place) -> tuple[fs.FileSystem, str]:
    return (fs.LocalFileSystem(), str(place)) if isinstance(place, Path) else place


def user_part(uri: str) -> str:
    """What stands before the host, with the @: an access key and its secret; "": nothing."""
    scheme, _, rest = uri.partition("?")[0].partition("://")
    return rest[: _secret_length(rest, scheme)]


def local_path(uri: str) -> Path | None:
    """Where it is on a local disk, from the root on; None: it is elsewhere."""
    if "://" not in uri and not uri.startswith("file:"):
        return Path(uri).absolute()
    parts = urlsplit(uri)
    return Path(unquote(parts.path)) if parts.scheme == "file" else None


def reach(uri: str, what: str) -> tuple[fs.FileSystem, str]:
    """The file system of a path or URI, and the path in it.

    Args:
        uri: as for `FileStorage`.
        what: names the setting that it comes from, in errors.

    Raises:
        OptionError: it is of a file system that pyarrow does not know.
    """
    return _reached(_root(uri, what))


def _root(uri: str, what: str = "checkpoint location") -> _Place:
    local = local_path(uri)
    if local is not None:
        return local
    scheme, _, rest = uri.partition("://")
    if _secret_length(rest.partition("?")[0], scheme) > len(rest.partition("/")[0]):
        raise OptionError(
            f"{what} {shown(uri)}: the secret before the host has a slash, which ends "
            f"the host. Write it as %2F; or give it by environment variables."
        )
    scheme = _SCHEMES.get(scheme, scheme)
    if scheme == "s3" and "allow_delayed_open" not in rest:
        rest += ("&" if "?" in rest else "?") + "allow_delayed_open=true"  # one request, not three
    try:
        files, root = fs.FileSystem.from_uri(f"{scheme}://{rest}")
    except Exception as error:
        reason = without_secrets(str(error), uri)
        raise OptionError(
            f"{what} {shown(uri)}: expected a path or a URI of a file system that "
            f"pyarrow knows (file, s3, s3a, gs, abfss, hdfs), found {scheme!r}: {reason}"
        ) from None
    return files, root.rstrip("/")


def put_local(path: Path, data: bytes) -> None:
    """Write a file on a local disk, atomically and durably."""
    with _durable_draft(path, data) as draft:
        draft.rename(path)
    fsync_folder(path.parent)


def _put_new_local(path: Path, data: bytes) -> bool:
    with _durable_draft(path, data) as draft:
        is_new = _linked(draft, path)
        draft.unlink()
    fsync_folder(path.parent)  # also of what another one has just linked: it counts from now on
    return is_new


def _linked(draft: Path, path: Path) -> bool:
    try:
        os.link(draft, path)
    except FileExistsError:
        # NFS repeats a request whose answer was lost: two names show that ours was the first.
        return draft.stat().st_nlink == 2
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
            raise
        raise OptionError(
            f"checkpoint {path.parent}: a file that must be new is needed here, and this file "
            f"system has no hard links to create one exclusively ({error.strerror}). Put the "
            f"checkpoint on another disk or on S3, or have a KafkaSink with transactions='epoch' "
            f"in the pipeline, which decides in Kafka instead."
        ) from None
    return True


@contextlib.contextmanager
def _durable_draft(path: Path, data: bytes) -> Iterator[Path]:
    """A file beside another, with its content to be; what goes wrong leaves none."""
    make_folder(path.parent)
    _remove_old_drafts(path.parent)
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        with open(draft, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        yield draft
    except (OSError, OptionError):
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


def make_folder(folder: Path) -> None:
    """Create a local folder, and those that lead to it, durably."""
    missing = list(takewhile(lambda each: not each.exists(), (folder, *folder.parents)))
    folder.mkdir(parents=True, exist_ok=True)
    for each in missing:  # each is a name in the one above it
        fsync_folder(each.parent)


def fsync_folder(path: Path) -> None:
    """Make the names in a local folder durable: files that were created, renamed or removed."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


_looked_through: set[Path] = set()


def _remove_old_drafts(folder: Path) -> None:
    """What killed processes left; each process looks once, before it first writes there."""
    if folder in _looked_through:
        return
    _looked_through.add(folder)
    oldest_s = time.time() - DRAFT_UNUSED_S
    for entry in os.scandir(folder):
        with contextlib.suppress(FileNotFoundError):
            if _DRAFT.fullmatch(entry.name) and entry.stat().st_mtime < oldest_s:
                os.unlink(entry)
