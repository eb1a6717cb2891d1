"""The Broker port for real: Kafka's protocol, its record batches as Arrow columns."""
