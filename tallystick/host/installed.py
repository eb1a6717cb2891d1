"""The origin of the installed Tallystick, and the command by which pip adds an extra."""

import json
from importlib.metadata import PackageNotFoundError, distribution


def pip_install(extra: str) -> str:
    """Return the command by which pip installs an extra, from where this Tallystick came."""
    try:
        origin = json.loads(distribution("tallystick").read_text("direct_url.json") or "{}")
    except PackageNotFoundError:
        origin = {}
    folder, slash, name = origin.get("url", "").removeprefix("file://").rpartition("/")
    what = f"{folder}{slash}{name or 'tallystick'}[{extra}]"
    if name.endswith(".whl") and extra in ("chaos", "demo"):  # they bring the wheel of the tools
        return f"pip install --find-links {folder} '{what}'"
    return f"pip install {'-e ' * ('dir_info' in origin)}'{what}'"
