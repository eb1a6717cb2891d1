"""`tallystick new my-job`: a folder with a pipeline, its test, an image and a page, which runs."""

import re
from importlib.resources import files
from pathlib import Path

from tallystick.errors import OptionError

FILES = ("pipeline.py", "test_pipeline.py", "Dockerfile", "README.md")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def write_job(folder: Path, version: str) -> None:
    """Write the files of a new job into a folder; the folder's name is the pipeline's.

    Args:
        folder: is made if it does not exist.
        version: of Tallystick, for the image.

    Raises:
        OptionError: the name cannot be a pipeline's, or one of the files exists.
    """
    name = folder.resolve().name
    if not _NAME.fullmatch(name):
        raise OptionError(
            f"{name!r} cannot be a pipeline's name: expected letters, digits, '.', '_' and '-', "
            f"the first a letter or digit, such as my-job"
        )
    for file in FILES:
        if (folder / file).exists():
            raise OptionError(f"{folder / file} exists already: nothing was written")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in FILES:
            text = (files(__name__) / f"{file}.txt").read_text()
            text = text.replace("JOB", name).replace("VERSION", version)
            (folder / file).write_text(text)
    except OSError as error:
        raise OptionError(f"{folder}: {(error.strerror or str(error)).lower()}") from None
