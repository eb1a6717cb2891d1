"""The public names of `tallystick.testing`: loaded from their modules when they are first used."""

from .driver import (
    Driver as Driver,
)
from .driver import (
    run as run,
)
from .kafka import EmbeddedKafka as EmbeddedKafka
from .security import (
    Grant as Grant,
)
from .security import (
    Security as Security,
)
from .security import (
    create_acls as create_acls,
)
