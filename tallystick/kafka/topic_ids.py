"""Kafka's own names for topics (KIP-516), as its messages and as ours have them."""

import base64
from uuid import UUID

NO_ID = UUID(int=0)
"""What a broker answers that knows no topic ids."""


def topic_id_text(topic_id: UUID | None) -> str:
    """22 characters of base64url, as Kafka's own tools print it; "" for no id."""
    if topic_id is None or topic_id == NO_ID:
        return ""
    return base64.urlsafe_b64encode(topic_id.bytes).decode().rstrip("=")


def topic_id_from(text: str) -> UUID:
    """Read back what `topic_id_text` made."""
    if not text:
        return NO_ID
    return UUID(bytes=base64.urlsafe_b64decode(text + "=="))
