"""A folder on a local disk or an object store, with the few operations for drafts and commits.

A local rename is atomic, and durable when the folder is synced; onto another device, where that is
not possible, a draft is copied. Object stores cannot rename: there the server copies a draft (the
copy appears whole), and drafts are deleted when all were copied.
"""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
from pyarrow import fs

from tallystick.errors import OptionError, StorageError
from tallystick.storage.exclusive import ExclusiveStore, store_settings
from tallystick.storage.file_storage import reach, scheme_of, shown, user_part, without_secrets
from tallystick.storage.local_files import (
    fsync_folder,
    link_between,
    move_local,
    put_local,
    put_new_local,
)
from tallystick.storage.places import local_path, resolved

WHAT = "path of a file sink"
HIDDEN = "_tallystick"
"""Spark, Hive and pyarrow leave out what begins with an underscore."""
LOCAL_BYTES_MAX = 4095
"""The longest path on a local disk: PATH_MAX, without the zero at its end."""
KEY_BYTES_MAX = 1024
"""The longest key of S3; those of other object stores are no shorter."""
REQUESTS_AT_ONCE = 16
"""To an object store; each takes some ten milliseconds of waiting."""

Item = TypeVar("Item")
Result = TypeVar("Result")


class Folder:
    """Files below one folder; all paths are relative to it. Picklable, for tasks.

    Args:
        uri: a path, or a URI as `FileStorage` knows them.
        what: the kind of sink, for errors.

    Raises:
        OptionError: see `places.resolved`.
    """

    def __init__(self, uri: str, what: str = "file sink") -> None:
        self._uri, self._what = resolved(uri, WHAT), what
        self._files, self._root = reach(self._uri, WHAT)
        self.is_local = local_path(self._uri) is not None
        self.location = shown(self._uri)
        """The URI without credentials and options."""
        self.name = f"{what} {self.location}"
        """The kind of sink and the location, for errors."""

    def __repr__(self) -> str:
        return f"Folder({self.location!r})"

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return Folder, (self._uri, self._what)

    def object_store(self) -> tuple[str, dict[str, str]]:
        """Return the URL of the folder, and the settings with which delta-rs reaches it."""
        if self.is_local:
            return self._root, {}
        region = self._files.region if isinstance(self._files, fs.S3FileSystem) else ""
        place, _, query = self._uri.partition("?")
        bucket, key = self.location.partition("://")[2].split("/", 1)
        uri = f"{scheme_of(place)}://{user_part(self._uri)}{bucket}?{query}"
        bucket, config, client = store_settings(uri, region)
        return f"{bucket}/{key}", config | {"allow_http": str(client["allow_http"]).lower()}

    def at(self, location: str) -> "Folder":
        """Return another folder, on the same kind of storage with the same options."""
        if location == self.location:
            return self
        scheme, separator, rest = location.partition("://")
        own, _, options = self._uri.partition("?")
        if separator and not self.is_local and own.partition("://")[0] == scheme:
            host = rest if "@" in rest.partition("/")[0] else user_part(self._uri) + rest
            return Folder(f"{scheme}://{host}" + (f"?{options}" if options else ""))
        return Folder(location)

    def room_for(self, path: str) -> int:
        """Return the number of bytes that a path may grow by; negative: the path is too long."""
        whole = self._whole(path)
        if self.is_local:
            return LOCAL_BYTES_MAX - len(whole.encode())
        return KEY_BYTES_MAX - len(whole.partition("/")[2].encode())  # without the bucket

    def create(self, path: str) -> Any:
        """Open a stream into a new file, and create the folders above."""
        whole = self._changed(path)
        with self._doing("writing", path):
            if self.is_local:
                self._files.create_dir(whole.rpartition("/")[0], recursive=True)
            return self._files.open_output_stream(whole)

    def put(self, path: str, data: bytes) -> None:
        """Write a small file, atomically and durably, in place of an older one."""
        with self._doing("writing", path):
            if self.is_local:
                put_local(Path(self._changed(path)), data)
                self.sync_folders([path])
                return
            with self.create(path) as stream:
                stream.write(data)

    def put_new(self, path: str, data: bytes) -> bool:
        """Write a small file that must not exist yet; return False if the name is taken.

        Raises:
            OptionError: the storage cannot decide between two writers, or obstore is missing.
            StorageError: whether the file was written is unknown.
        """
        with self._doing("creating", path):
            if self.is_local:
                is_new = put_new_local(Path(self._changed(path)), data)
                self.sync_folders([path])
                return is_new
            whole = self._changed(path)
            bucket, _, key = whole.partition("/")
            region = self._files.region if isinstance(self._files, fs.S3FileSystem) else ""
            place, _, options = self._uri.partition("?")
            uri = f"{scheme_of(place)}://{user_part(self._uri)}{bucket}?{options}"
            store = ExclusiveStore(uri, self.name, "or write without commit_every=", region)
            return store.create(key, data)

    def get(self, path: str) -> bytes | None:
        """Read a small file; None if it does not exist, known by one request to an object store."""
        with self._doing("reading", path):
            try:
                with self._files.open_input_stream(self._whole(path)) as stream:
                    return bytes(stream.read())
            except FileNotFoundError:
                return None

    def get_all(self, paths: Iterable[str]) -> list[bytes | None]:
        """Read small files; see `get`."""
        return self._concurrently(self.get, list(paths))

    def end(self, path: str, length: int) -> bytes:
        """Return the last bytes of a file."""
        with self._doing("reading", path), self._files.open_input_file(self._whole(path)) as file:
            size = file.size()
            return bytes(file.read_at(min(size, length), max(0, size - length)))

    def sizes(self, paths: Iterable[str]) -> dict[str, int]:
        """Return the sizes of the files that exist."""
        paths = list(paths)
        with self._doing("looking for", paths[0] if paths else ""):
            infos = self._concurrently(
                lambda path: self._files.get_file_info(self._whole(path)), paths
            )
        return {
            path: info.size
            for path, info in zip(paths, infos, strict=True)
            if info.type == fs.FileType.File
        }

    def sync_files(self, paths: Iterable[str]) -> None:
        """Make new files durable, with the folders above."""
        if not self.is_local:
            return
        paths = list(paths)
        for path in paths:
            with self._doing("syncing", path), open(self._whole(path), "rb+") as file:
                os.fsync(file.fileno())
        self.sync_folders(paths)

    def sync_folders(self, paths: Iterable[str]) -> None:
        """Make the names of files durable, and the names of all folders above."""
        if not self.is_local:
            return
        folders = {
            parent for path in paths for parent in Path(path).parents if not parent.is_absolute()
        }
        root = Path(self._root)
        with self._doing("syncing", ""):
            for folder in sorted(folders, key=lambda path: len(path.parts), reverse=True):
                fsync_folder(root / folder)
            fsync_folder(root.parent)

    def reveal(self, moves: Iterable[tuple[str, str]]) -> None:
        """Rename drafts to their final names; on an object store the drafts stay for now."""

        def one(move: tuple[str, str]) -> None:
            draft, final = move
            with self._doing("making visible", final):
                if self.is_local:
                    os.makedirs(os.path.dirname(self._whole(final)), exist_ok=True)
                    move_local(Path(self._changed(draft)), Path(self._whole(final)))
                else:
                    self._files.copy_file(self._whole(draft), self._whole(final))

        moves = list(moves)
        self._concurrently(one, moves)
        self.sync_folders(final for _, final in moves)

    def names(self, folder: str) -> list[str]:
        """Return the names of the files and folders in a folder, sorted; empty if there is none."""
        return sorted(info.base_name for info in self._listed(folder))

    def written_ms(self, folder: str) -> dict[str, int]:
        """Return the names of the files in a folder, with the times at which they were written."""
        return {
            info.base_name: (info.mtime_ns or 0) // 1_000_000
            for info in self._listed(folder)
            if info.type == fs.FileType.File
        }

    def files(self, folder: str) -> dict[str, int]:
        """Return the paths below a folder, relative to it, with their sizes."""
        infos = self._listed(folder, recursive=True)
        start = len(self._whole(folder).rstrip("/")) + 1
        return {info.path[start:]: info.size for info in infos if info.type == fs.FileType.File}

    def _listed(self, folder: str, *, recursive: bool = False) -> list[fs.FileInfo]:
        with self._doing("listing", folder):
            selector = fs.FileSelector(
                self._whole(folder), allow_not_found=True, recursive=recursive
            )
            return list(self._files.get_file_info(selector))

    def remove(self, path: str) -> None:
        """Remove a folder and its content, or a file at the path; do nothing if neither exists.

        A symbolic link is removed alone, without its target.
        """
        whole = self._changed(path)
        with self._doing("removing", path), contextlib.suppress(FileNotFoundError):
            if not self.is_local:
                self._files.delete_dir(whole)
            elif os.path.isdir(whole) and not os.path.islink(whole):
                shutil.rmtree(whole)
            else:
                os.unlink(whole)

    def remove_file(self, path: str) -> None:
        """Remove a file, if it exists."""
        whole = self._changed(path)
        with self._doing("removing", path), contextlib.suppress(FileNotFoundError):
            self._files.delete_file(whole)

    def remove_files(self, paths: Iterable[str]) -> None:
        """Remove files, those that exist; several at a time on an object store."""
        self._concurrently(self.remove_file, list(paths))

    def _changed(self, path: str) -> str:
        """Return the whole path of a file or folder to write, move or remove.

        Raises:
            OptionError: a symbolic link below the hidden folder is in its way.
        """
        whole = self._whole(path)
        if self.is_local and path.startswith(f"{HIDDEN}/"):
            link = link_between(Path(self._root), Path(whole))
            if link is not None:
                raise OptionError(
                    f"{self._what} {self.location}: {link} is a symbolic link, and nothing "
                    f"is written, moved or removed through one: whoever made it may have aimed it "
                    f"at other files. Put the folder itself there."
                )
        return whole

    def _whole(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def _concurrently(self, do: Callable[[Item], Result], items: list[Item]) -> list[Result]:
        if self.is_local or len(items) < 2:
            return [do(item) for item in items]
        with ThreadPoolExecutor(min(REQUESTS_AT_ONCE, len(items))) as pool:
            return list(pool.map(do, items))

    @contextlib.contextmanager
    def _doing(self, doing: str, path: str) -> Iterator[None]:
        try:
            yield
        except (OSError, pa.ArrowException) as error:
            raise self.failed(f"{doing} {path}", error) from None

    def failed(self, doing: str, error: Exception) -> StorageError:
        """Return the error to raise for a failed operation."""
        reason = without_secrets(str(error), self._uri)
        return StorageError(
            f"{self._what} {self.location}: {doing} failed: {reason}. Nothing is visible that was "
            f"not decided, and it is tried again; make room or give access."
        )
