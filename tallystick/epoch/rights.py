"""The rights that a user of Kafka needs, as plain values, and how to grant them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

TOPIC, GROUP, TRANSACTIONAL_ID = "topic", "group", "transactional-id"
READ, WRITE = "READ", "WRITE"


@dataclass(frozen=True, slots=True, order=True)
class Right:
    """One operation on one resource.

    Args:
        resource: TOPIC, GROUP or TRANSACTIONAL_ID, as `kafka-acls` spells them.
        name: of the resource.
        operation: READ or WRITE.
        prefix: what to grant the right on, if all names in use begin with it; "": the name itself.
    """

    resource: str
    name: str
    operation: str
    prefix: str = ""

    def __post_init__(self) -> None:
        assert self.name.startswith(self.prefix), self

    def __str__(self) -> str:
        what = self.resource.replace("-", " ")
        if self.prefix:
            return f"{self.operation} on every {what} that begins with {self.prefix!r}"
        return f"{self.operation} on {what} {self.name!r}"

    @property
    def grant(self) -> str:
        """The arguments with which `kafka-acls --add` grants the right."""
        words = f"--operation {self.operation.capitalize()} --{self.resource} "
        if self.prefix:
            return f"{words}'{self.prefix}' --resource-pattern-type prefixed"
        return f"{words}'{self.name}'"


def reading(topics: Iterable[str]) -> tuple[Right, ...]:
    """Return the rights to read topics."""
    return tuple(Right(TOPIC, topic, READ) for topic in sorted(topics))


def writing(topics: Iterable[str]) -> tuple[Right, ...]:
    """Return the rights to write topics."""
    return tuple(Right(TOPIC, topic, WRITE) for topic in sorted(topics))


def committing(
    transactional_id: str, token_group: str, token_topic: str, *, prefix: str = ""
) -> tuple[Right, ...]:
    """Return the rights to commit transactions with a token.

    Args:
        transactional_id: its id.
        token_group: of the token.
        token_topic: under which the token is kept.
        prefix: of id and group, where they are one of many; "": they are the only ones.
    """
    return (
        Right(TRANSACTIONAL_ID, transactional_id, WRITE, prefix),
        Right(GROUP, token_group, READ, prefix),
        *reading([token_topic]),
    )


def showing(group: str, topics: Iterable[str]) -> tuple[Right, ...]:
    """Return the rights to commit positions to a consumer group."""
    return (Right(GROUP, group, READ), *reading(topics))


def lacking(missing: Sequence[Right], user: str) -> str:
    """Return a message with a user's missing rights and the command to grant them.

    Args:
        missing: one at least.
        user: the name of the login; "": it has none.
    """
    wanted = ", ".join(map(str, sorted(missing)))
    grants = "; ".join(right.grant for right in sorted(missing))
    who = f"user {user!r}" if user else "the user of this connection"
    principal = f"User:{user}" if user else "User:<its name>"
    return (
        f"{who} lacks {wanted}. Grant it with kafka-acls --add --allow-principal {principal}, once "
        f"for each of: {grants}"
    )
