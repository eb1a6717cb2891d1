from collections.abc import Iterator

import pytest

from tallystick.testing import EmbeddedKafka, Security, create_acls
from tests.security.people import GRANTS, PASSWORDS, TOPICS


@pytest.fixture(scope="module")
def guarded() -> Iterator[EmbeddedKafka]:
    """One broker with TLS, logins and access control, and everybody who has some right on it.

    One per file of tests: pipelines have the names of their users in all of them.
    """
    with EmbeddedKafka(security=Security(PASSWORDS)) as kafka:
        for topic in TOPICS:
            kafka.create_topic(topic, 2)
        for grants in GRANTS.values():
            create_acls(kafka.confluent_options(), grants)
        yield kafka
