"""The public names of `tallystick.testing`: loaded from their modules when they are first used."""

from .driver import (
    Driver as Driver,
    run as run,
)
from .kafka import EmbeddedKafka as EmbeddedKafka
from .security import (
    Grant as Grant,
    Security as Security,
    create_acls as create_acls,
)
