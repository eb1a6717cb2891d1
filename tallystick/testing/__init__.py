"""A real Kafka inside a test: for our tests and for users'."""
