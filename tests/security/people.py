"""Who may do what on the guarded broker, and how each logs in."""

from tallystick.kafka.config import KafkaConfig
from tallystick.testing import EmbeddedKafka, Grant

TOPIC = "guarded"
TOKENS = "tokens"
TOPICS = (TOPIC, TOKENS, "guarded-in", "guarded-out")


def minimal(user: str) -> dict[str, list[Grant]]:
    """The rights that a pipeline of this user needs, and no other; by what they are for."""
    return {
        "transactional-id": [
            Grant(user, "TRANSACTIONAL_ID", f"tallystick-{user}", "WRITE", prefixed=True)
        ],
        "topic-write": [Grant(user, "TOPIC", TOPIC, "WRITE", prefixed=True)],
        "topic-read": [Grant(user, "TOPIC", TOPIC, "READ", prefixed=True)],
        "group": [
            Grant(user, "GROUP", f"tallystick-{user}", "READ", prefixed=True),
            Grant(user, "GROUP", user, "READ", prefixed=True),
        ],
    }


def _all(user: str) -> list[Grant]:
    return [grant for grants in minimal(user).values() for grant in grants]


def _without(user: str, missing: str) -> list[Grant]:
    return [grant for part, grants in minimal(user).items() if part != missing for grant in grants]


GRANTS: dict[str, list[Grant]] = {
    "alice": _all("alice"),
    "observer": [*_all("observer"), Grant("observer", "CLUSTER", "", "DESCRIBE_CONFIGS")],
    "spectator": [  # may see the groups, and not commit to them
        *_without("spectator", "group"),
        Grant("spectator", "GROUP", "tallystick-spectator", "DESCRIBE", prefixed=True),
    ],
    "writer": [  # may not read what it writes: its token is kept elsewhere
        *_without("writer", "topic-read"),
        Grant("writer", "TOPIC", TOKENS, "READ"),
    ],
    **{f"no-{missing}": _without(f"no-{missing}", missing) for missing in minimal("x")},
}
"""User -> rights; `nobody` has none."""
PASSWORDS = {user: f"{user}-s3cr3t" for user in ("admin", "nobody", *GRANTS)}


def options_of(kafka: EmbeddedKafka, user: str) -> dict[str, str]:
    """The names of Kafka's Java client, without `kafka.`."""
    options = kafka.kafka_options_for(user).items()
    return {name.removeprefix("kafka."): value for name, value in options}


def config_of(kafka: EmbeddedKafka, user: str, **changes: str) -> KafkaConfig:
    """How a user reaches the broker; with the default deadline, so that only errors are quick."""
    return KafkaConfig.from_options({**options_of(kafka, user), "client.id": user, **changes})
