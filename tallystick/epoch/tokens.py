"""Tokens as Kafka stores them, and the choice of the newest among several.

A consumer group holds offsets by partition, and the topic of a partition must exist: a sink that
changes its topic leaves tokens under both. Each commit writes the token to every place that holds
one, so all are the same as long as Kafka takes every write; where not, the newest counts.

Invariants:
    * Of one lineage the token with the greatest epoch is the newest.
    * Of two lineages the token with more take-overs is the newest: a take-over counts one more than
      it finds. Epoch numbers say nothing, since each checkpoint counts its own.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from tallystick.errors import UNREADABLE, DataLossError, ManifestError
from tallystick.values import TopicPartition

TOKEN_VERSION = 1

Held = Mapping[TopicPartition, tuple[int, str]]
"""The contents of a token group: (offset, metadata) by place."""


@dataclass(frozen=True, slots=True)
class Token:
    """The record inside a transaction by which Kafka shows the epoch committed last.

    Stored as a consumer-group offset: the offset is `checkpoint_id + 1`, the next epoch, as Kafka's
    offsets always name the next record; the rest is its metadata.
    """

    checkpoint_id: int
    lineage: str
    checkpoint: str
    manifest_path: str
    takeover_count: int = 0
    """The number of takeovers by another lineage; a token without a count has 0."""
    staged_at: str = field(default="", compare=False)
    """The time when it was put into its transaction, for messages; "": an older release did."""

    def __post_init__(self) -> None:
        assert self.checkpoint_id >= -1, self
        assert self.takeover_count >= 0, self


def encode_token(token: Token) -> tuple[int, str]:
    """Return the token as Kafka stores it: (offset, metadata)."""
    fields = {
        "tallystick": TOKEN_VERSION,
        "lineage": token.lineage,
        "checkpoint": token.checkpoint,
        "manifest": token.manifest_path,
        **({"takeovers": token.takeover_count} if token.takeover_count else {}),
        **({"at": token.staged_at} if token.staged_at else {}),
    }
    return token.checkpoint_id + 1, json.dumps(fields, separators=(",", ":"))


def decode_token(offset: int, metadata: str) -> Token:
    """Read back what `encode_token` made.

    Raises:
        DataLossError: something else committed offsets under the pipeline's token group.
    """
    try:
        fields = json.loads(metadata)
        if fields["tallystick"] != TOKEN_VERSION:
            raise ManifestError(
                f"token of version {fields['tallystick']}, this release reads {TOKEN_VERSION}: "
                f"run the release that wrote it, or a newer one."
            )
        texts = (fields["lineage"], fields["checkpoint"], fields["manifest"])
        takeovers, staged_at = fields.get("takeovers", 0), fields.get("at", "")
        if not all(isinstance(text, str) for text in (*texts, staged_at)) or (
            type(takeovers) is not int
        ):
            raise TypeError("expected four texts and a whole number")
        return Token(offset - 1, *texts, takeovers, staged_at)
    except UNREADABLE as error:
        raise DataLossError(
            f"the pipeline's token group holds offset {offset} with metadata {metadata[:200]!r}, "
            f"which is no token: a consumer or a tool has used the group. Which epoch is committed "
            f"last is unknown. Find the tool; then start from a new checkpoint, or give the "
            f"pipeline another name."
        ) from error


def newest_token(group_tokens: Held, place: TopicPartition, lineage: str) -> Token | None:
    """Return the token that counts: the lineage's newest of the last take-over, else the place's.

    A place that could not be written keeps an older token, which may be this lineage's own.

    Args:
        group_tokens: the tokens that the group holds.
        place: where the sink keeps its token now.
        lineage: of the checkpoint that asks.
    """
    decoded = _decoded(group_tokens)
    last = max((token.takeover_count for token in decoded.values()), default=0)
    tokens = {at: token for at, token in decoded.items() if token.takeover_count == last}
    own = [token for token in tokens.values() if token.lineage == lineage]
    if own:
        return max(own, key=lambda token: token.checkpoint_id)
    if place in tokens:
        return tokens[place]
    return next(iter(tokens.values()), None)


def takeover_count(group_tokens: Held, lineage: str) -> int:
    """Return the count of a lineage's next token: beyond that of every other lineage.

    Args:
        group_tokens: what the group holds before.
        lineage: of the checkpoint that commits.
    """
    tokens = _decoded(group_tokens).values()
    return max(
        (token.takeover_count + (token.lineage != lineage) for token in tokens),
        default=0,
    )


def _decoded(group_tokens: Held) -> dict[TopicPartition, Token]:
    return {at: decode_token(*encoded) for at, encoded in sorted(group_tokens.items())}
