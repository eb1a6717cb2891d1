"""Kafka's word on what a pipeline decided last, for those who are not its driver."""

from tallystick.checkpoint.newest_epoch import Ask, TokenAnswer
from tallystick.epoch.tokens import newest_token
from tallystick.epoch.transactional_ids import token_group
from tallystick.errors import DataLossError
from tallystick.kafka.broker import KafkaBroker
from tallystick.kafka.config import KafkaConfig
from tallystick.values import TopicPartition

NOWHERE = TopicPartition("", 0)
"""The token is found wherever the group has it."""


def asking(config: KafkaConfig) -> Ask:
    """Return who asks a cluster; an answer waits for a commit that is under way."""

    def ask(transactional_id: str, lineage: str) -> TokenAnswer:
        broker = KafkaBroker(config)
        try:
            held = broker.group_offsets(token_group(transactional_id))
            return TokenAnswer(newest_token(held, NOWHERE, lineage))
        except DataLossError as error:
            return TokenAnswer(None, str(error))
        finally:
            broker.close()

    return ask
