"""All decoders of bytes that come from Kafka, from storage or from a registry."""

from tests.fuzz import answers, records, stored, values

DECODERS = {**records.DECODERS, **values.DECODERS, **stored.DECODERS, **answers.DECODERS}
