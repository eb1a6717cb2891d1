"""The classes that a user writes: pipelines, steps, sources and sinks."""
