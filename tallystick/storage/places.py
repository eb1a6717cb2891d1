"""The places of checkpoints, savepoints and sinks' files: resolved once from the users' texts.

Tasks, the driver and later starts have to mean one place by a text, whatever folder each runs in.
So code that takes a place from a user calls `resolved` at once, in the driver, and hands on the
result: an absolute path on a local disk, or the URI of an object store.
"""

import os
import re
from pathlib import Path
from typing import TypeAlias
from urllib.parse import unquote

from tallystick.errors import OptionError
from tallystick.storage.exclusive import SCHEMES

Place: TypeAlias = str | os.PathLike[str]
"""A path or a URI, as users give it."""

HADOOPS_SCHEMES = {"s3a": "s3", "s3n": "s3"}
"""Schemes that Hadoop and pyarrow name differently, by Hadoop's name."""

_WITH_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(/*)(.*)", re.DOTALL)
"""A scheme as RFC 3986 has it: no slash is before its colon."""
_DBFS = (
    "Spark knows it on Databricks, and nothing else does: give the path under which it is mounted, "
    "/dbfs/…, or the URI of the bucket"
)


def resolved(place: Place, what: str = "checkpoint location") -> str:
    """Return the absolute path of a place on a local disk, or its URI on an object store.

    `file:/a` is Hadoop's form, in which Spark names a checkpoint, and every character of it is
    itself; `file:///a` is a URI, which has escapes. `~` is the home of the user who runs this.

    Args:
        place: as a user gave it.
        what: names the setting that holds the place, in errors.

    Raises:
        OptionError: the text names no place, a place that we cannot reach, or could be read as
            another place.
    """
    text = os.fspath(place) if isinstance(place, str | os.PathLike) else None
    if not isinstance(text, str):
        raise OptionError(
            f"{what} {place!r} is a {type(place).__name__}: expected a path or a URI, as text or "
            f"as a pathlib.Path"
        )
    if not text.strip():
        raise OptionError(
            f"{what} is empty ({text!r}): expected a path or a URI. If it comes from a variable of "
            f"the environment, is that set?"
        )
    _check_ends(text, what)
    match = _WITH_SCHEME.fullmatch(text)
    if match is None:
        return _check_ends(str(_at_home(text, what).absolute()), what)
    scheme, slashes, rest = match.groups()
    if scheme.lower() == "file" and slashes:
        return _check_ends(str(_of_file_uri(text)), what)
    known = HADOOPS_SCHEMES.get(scheme, scheme)
    if len(slashes) < 2 or known not in SCHEMES:
        raise _unknown(scheme, slashes, rest, what)
    if len(slashes) > 2 or not rest.partition("?")[0]:
        raise OptionError(
            f"{what} {scheme}:{slashes}{rest.partition('?')[0]}: the name of a bucket or container "
            f"is missing behind {scheme}://. If it comes from a variable of the environment, is "
            f"that set?"
        )
    return text


def make_local(location: str, what: str) -> None:
    """Make the folder of a resolved place on a local disk; other places are left alone.

    Args:
        location: as `resolved` returns it.
        what: names the setting that holds the place, in errors.

    Raises:
        OptionError: the folder cannot be made, or not written to.
    """
    if not location.startswith("/"):
        return
    try:
        os.makedirs(location, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise OptionError(
            f"{what} {location}: the folder cannot be made: it, or one above it, is a file. Name "
            f"another place"
        ) from None
    except OSError as error:
        raise OptionError(f"{what} {location}: the folder cannot be made: {error}") from None
    if not os.access(location, os.W_OK):
        raise OptionError(f"{what} {location}: the folder cannot be written to by this user")


def local_path(place: Place) -> Path | None:
    """Return a place's absolute path on a local disk; None: the place is elsewhere.

    Raises:
        OptionError: see `resolved`.
    """
    location = resolved(place)
    return Path(location) if location.startswith("/") else None


def _check_ends(text: str, what: str) -> str:
    """Refuse a place with white space at an end, also before its last slashes; else return it."""
    name = text.rstrip("/")
    if text != text.strip() or name != name.rstrip() or "\0" in text:
        raise OptionError(
            f"{what} {text!r} has white space at an end, or a zero byte: another place than the "
            f"one of this name would be meant. Take it out"
        )
    return text


def _at_home(text: str, what: str) -> Path:
    if not text.startswith("~"):
        return Path(text)
    expanded = os.path.expanduser(text)
    if expanded.startswith("~"):
        name = text.partition("/")[0]
        raise OptionError(
            f"{what} {text!r}: {name} stands for the home of a user, and none of this name is "
            f"known here. Write the whole path; or ./{text}, if a folder has this name"
        )
    return Path(expanded)


def _of_file_uri(text: str) -> Path:
    if not text[len("file:") :].startswith("//"):
        return Path(text[len("file:") :]).absolute()
    rest = text[len("file://") :]
    host, slash, path = rest.partition("/")
    if "#" in rest or "?" in rest:
        raise OptionError(
            f"{text}: in a URI, # and ? end the path, so another folder than the one of this name "
            f"would be meant. Nothing was changed. Write %23 for # and %3F for ?, or give the path "
            f"without file://."
        )
    if not slash or host not in ("", "localhost"):
        raise OptionError(
            f"{text}: what stands between file:// and the next slash is a host, and only this "
            f"one's files can be reached. Nothing was changed. Write file:///{rest}, with three "
            f"slashes, if that is the path."
        )
    unquoted = unquote(slash + path)
    if "\0" in unquoted:
        raise OptionError(f"{text}: %00 is a zero byte, which no path has. Take it out")
    return Path(unquoted)


def _unknown(scheme: str, slashes: str, rest: str, what: str) -> OptionError:
    """Return the error about a text that begins with a scheme and names no place."""
    # A key before the host is no part of a message.
    text = f"{what} {scheme}:{slashes}{rest.partition('?')[0].rpartition('@')[2]}"
    known = HADOOPS_SCHEMES.get(scheme.lower(), scheme.lower())
    expected = "expected a local path, file, s3, s3a, gs, abfs or abfss"
    if known == "dbfs":
        return OptionError(f"{text}: the scheme 'dbfs' is not supported; {expected}. {_DBFS}.")
    if known == "file":
        return OptionError(f"{text}: a URI of a file has the whole path: file:/{rest}, if it is so")
    if len(scheme) == 1:
        return OptionError(
            f"{text}: this is a path of Windows, and {os.name} has no drives: give it as it is "
            f"called here; or ./{scheme}:{slashes}{rest}, if a folder has this name"
        )
    if known in SCHEMES:
        return OptionError(
            f"{text}: a URI of {scheme.lower()} begins with {scheme.lower()}://, in small letters "
            f"and with two slashes, which a pathlib.Path makes one: give it as text"
        )
    if len(slashes) < 2:
        return OptionError(
            f"{text}: the scheme {scheme!r} is not supported; {expected}. If a folder has this "
            f"name, write ./{scheme}:{slashes}{rest}"
        )
    return OptionError(
        f"{text}: the scheme {scheme!r} is not supported; {expected}. Put it on a local (or "
        f"mounted) disk, S3, Google Cloud Storage or Azure."
    )
