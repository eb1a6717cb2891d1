"""Tallystick: exactly-once streaming for people who have PySpark and Kafka.

The public names stand in `__init__.pyi` and are loaded when they are used: workers, pytest runs and
`--help` import this package too, and need not wait for Spark.
"""

from typing import Any

import lazy_loader

from tallystick.host import excepthook

if not __debug__:
    raise ImportError(
        "Tallystick does not run under python -O or PYTHONOPTIMIZE, which take out the checks that "
        "guard against lost and repeated records: start without"
    )

_public, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
excepthook.install()


def __getattr__(name: str) -> Any:
    """Return a public name, loaded from its module; for another name say which one is meant."""
    if name == "__version__":  # of what is installed: pyproject.toml is the one place
        from importlib.metadata import version

        return version("tallystick")
    try:
        return _public(name)
    except AttributeError:
        if name.startswith("__"):
            raise
        from tallystick.words import unknown_name

        raise unknown_name("tallystick", name, __all__) from None
