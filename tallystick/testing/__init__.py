"""Tests of pipelines: a pipeline in this process, a real Kafka, and pytest fixtures.

    from tallystick.testing import Driver, run          without Kafka and Spark, in milliseconds
    from tallystick.testing import EmbeddedKafka        a real broker

The fixtures `tallystick_kafka` and `tallystick_topic` are there as soon as Tallystick is installed
(see `tallystick.testing.pytest_plugin`). The public names stand in `__init__.pyi` and are loaded
when they are used: pytest imports this package in every run.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
