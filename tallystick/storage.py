"""The Storage port for real: a checkpoint location on any file system that pyarrow reaches.

A file appears whole or not at all, and is durable when `put` returns. On a local disk that takes a
temporary file, fsync, a rename, and an fsync of the folder; object stores do it by themselves.
"""

import contextlib
import os
import re
import time
import uuid
from pathlib import Path
from urllib.parse import unquote, urlsplit

from pyarrow import fs

from tallystick.errors import OptionError, StorageError

_HADOOP_SCHEMES = {"s3a": "s3", "s3n": "s3", "gs": "gs", "hdfs": "hdfs", "abfss": "abfss"}


class FileStorage:
    """Files below one folder.

    Args:
        uri: a path, or a URI with the schemes that Spark knows (`file:`, `hdfs:`, `s3a:` …).

    Raises:
        OptionError: the URI is of a file system that pyarrow does not know.
    """

    def __init__(self, uri: str) -> None:
        self._location = re.sub(r"//[^/@]*@", "//", uri)  # an access key may stand before the host
        self._local = _local_path(uri)
        if self._local is None:
            self._files, self._root = _remote(uri, self._location)

    def __repr__(self) -> str:
        return f"FileStorage({self._location!r})"

    @property
    def location(self) -> str:
        """The URI that paths are relative to, without credentials."""
        return self._location

    def put(self, path: str, data: bytes) -> None:
        """Write a new file, atomically and durably.

        Raises:
            StorageError: it could not be written; nothing of it is visible under its name.
        """
        try:
            if self._local is not None:
                _put_local(self._local / path, data)
            else:
                with self._files.open_output_stream(f"{self._root}/{path}") as stream:
                    stream.write(data)
        except OSError as error:
            raise StorageError(
                f"checkpoint {self._location}: writing {path} ({len(data)} bytes) failed: {error}. "
                f"Nothing was committed. Make room or give access, then start again."
            ) from error

    def get(self, path: str) -> bytes | None:
        """Read a whole file; None if there is none."""
        try:
            if self._local is not None:
                return (self._local / path).read_bytes()
            with self._files.open_input_stream(f"{self._root}/{path}") as stream:
                return bytes(stream.read())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StorageError(
                f"checkpoint {self._location}: reading {path} failed: {error}"
            ) from error

    def get_range(self, path: str, offset: int, length: int) -> bytes | None:
        """Read a part of a file; None if there is none. See `ports.Storage.get_range`."""
        try:
            files, whole = self._place(path)
            with files.open_input_file(whole) as file:
                size = file.size()
                start = offset if offset >= 0 else max(0, size + offset)
                return bytes(file.read_at(max(0, min(length, size - start)), min(start, size)))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StorageError(
                f"checkpoint {self._location}: reading {length} bytes of {path} failed: {error}"
            ) from error

    def delete(self, path: str) -> None:
        """Remove a file; nothing happens if there is none."""
        try:
            files, whole = self._place(path)
            files.delete_file(whole)
        except FileNotFoundError:
            return
        except OSError as error:
            raise StorageError(
                f"checkpoint {self._location}: removing {path} failed: {error}"
            ) from error

    def _place(self, path: str) -> tuple[fs.FileSystem, str]:
        if self._local is not None:
            return fs.LocalFileSystem(), str(self._local / path)
        return self._files, f"{self._root}/{path}"

    def names(self, folder: str) -> list[str]:
        """The paths of the files in a folder, sorted; empty if there is no such folder."""
        try:
            if self._local is not None:
                found = [entry.name for entry in os.scandir(self._local / folder)]
            else:
                selector = fs.FileSelector(f"{self._root}/{folder}", allow_not_found=True)
                found = [info.base_name for info in self._files.get_file_info(selector)]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StorageError(
                f"checkpoint {self._location}: listing {folder} failed: {error}"
            ) from error
        return sorted(f"{folder}/{name}" for name in found if not name.startswith("."))


class SystemClock:
    """The Clock port for real."""

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)

    def nonce(self) -> str:
        """A name that no other run will draw."""
        return uuid.uuid4().hex[:16]


def _local_path(uri: str) -> Path | None:
    if "://" not in uri and not uri.startswith("file:"):
        return Path(uri).absolute()
    parts = urlsplit(uri)
    return Path(unquote(parts.path)) if parts.scheme == "file" else None


def _remote(uri: str, shown: str) -> tuple[fs.FileSystem, str]:
    scheme, _, rest = uri.partition("://")
    try:
        files, root = fs.FileSystem.from_uri(f"{_HADOOP_SCHEMES.get(scheme, scheme)}://{rest}")
    except Exception as error:
        reason = re.sub(r"//[^/@\s]*@", "//", str(error))
        raise OptionError(
            f"checkpoint location {shown}: expected a path or a URI of a file system that pyarrow "
            f"knows (file, s3, s3a, gs, abfss, hdfs), found {scheme!r}: {reason}"
        ) from None
    return files, root.rstrip("/")


def _put_local(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        with open(draft, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.rename(path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
