"""Composition: what a start makes of a declared pipeline, and the loop that runs it on Spark."""
