"""The token as Kafka stores it, and which of several counts.

A consumer group holds offsets by partition, and the partition is one of a topic that must exist: a
sink that changes its topic leaves tokens under both. Each commit writes the token to every place
where one is, so they are the same as long as Kafka takes them all; where not, the newest counts.
"""

import json
from collections.abc import Mapping

from tallystick.errors import DataLossError, ManifestError
from tallystick.sink.transaction import Token
from tallystick.topic_partition import TopicPartition

TOKEN_VERSION = 1


def encode_token(token: Token) -> tuple[int, str]:
    """A token as Kafka stores it: (offset, metadata)."""
    fields = {
        "tallystick": TOKEN_VERSION,
        "lineage": token.lineage,
        "checkpoint": token.checkpoint,
        "manifest": token.manifest_path,
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
        return Token(offset - 1, fields["lineage"], fields["checkpoint"], fields["manifest"])
    except (ValueError, KeyError, TypeError) as error:
        raise DataLossError(
            f"the pipeline's token group holds offset {offset} with metadata {metadata[:200]!r}, "
            f"which is no token: a consumer or a tool has used the group. Which epoch is committed "
            f"last cannot be told. Find the tool; then start from a new checkpoint, or give the "
            f"pipeline another name."
        ) from error


def newest_token(
    found: Mapping[TopicPartition, tuple[int, str]], place: TopicPartition, lineage: str
) -> Token | None:
    """Which token counts: of this lineage the newest; else the one at its place, or any.

    Args:
        found: what the group holds.
        place: where the sink keeps it now.
        lineage: of the checkpoint that asks.
    """
    tokens = {at: decode_token(*held) for at, held in sorted(found.items())}
    own = [token for token in tokens.values() if token.lineage == lineage]
    if own:
        return max(own, key=lambda token: token.checkpoint_id)
    if place in tokens:
        return tokens[place]
    return next(iter(tokens.values()), None)
