"""The operator's tools: inspect, recover, transactions, savepoints, metrics."""
