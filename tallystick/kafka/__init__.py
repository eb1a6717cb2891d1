"""Access to Kafka: connections, requests, errors, fetching, transactions, deciding."""
