"""A real Kafka for your own tests, and pytest fixtures.

    from tallystick.testing import EmbeddedKafka

The fixtures `tallystick_kafka` and `tallystick_topic` are there as soon as Tallystick is installed
(see `tallystick.testing.pytest_plugin`).
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tallystick.testing.kafka import EmbeddedKafka
    from tallystick.testing.security import Grant, Security, create_acls

__all__ = ["EmbeddedKafka", "Grant", "Security", "create_acls"]


def __getattr__(name: str) -> Any:
    """Import on first use: pytest loads this package in every run."""
    if name == "EmbeddedKafka":
        from tallystick.testing.kafka import EmbeddedKafka

        return EmbeddedKafka
    if name in __all__:
        from tallystick.testing import security

        return getattr(security, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
