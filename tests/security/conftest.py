import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = str(Path(__file__).parents[2])
if ROOT not in sys.path:  # plain `pytest` does not put it there, `python -m pytest` does
    sys.path.insert(0, ROOT)

from tallystick.testing import EmbeddedKafka, Security, create_acls  # noqa: E402
from tests.security.people import GRANTS, PASSWORDS, TOPICS  # noqa: E402


@pytest.fixture(scope="session")
def guarded() -> Iterator[EmbeddedKafka]:
    """One broker with TLS, logins and access control, and everybody who has some right on it."""
    with EmbeddedKafka(security=Security(PASSWORDS)) as kafka:
        for topic in TOPICS:
            kafka.create_topic(topic, 2)
        for grants in GRANTS.values():
            create_acls(kafka.confluent_options(), grants)
        yield kafka
