"""Tallystick, Flink and Kafka Streams under the same schedule of kills."""
