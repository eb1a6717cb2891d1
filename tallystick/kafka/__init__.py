"""Kafka for real: connections, requests, errors, fetching, transactions, deciding."""
