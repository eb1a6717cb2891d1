"""The classes that a user writes: a pipeline, its steps, its sources and sinks."""
