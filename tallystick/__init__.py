"""Tallystick: exactly-once streaming for people who have PySpark and Kafka.

The public names stand in `__init__.pyi` and are loaded when they are used: workers, pytest runs and
`--help` import this package too, and need not wait for Spark.
"""

import lazy_loader

from tallystick.host import excepthook

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
excepthook.install()
__version__ = "0.1.0"
