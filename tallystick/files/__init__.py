"""Parquet files that appear when their epoch was decided, on any file system that pyarrow reaches.

    task     drafts in a hidden folder ─► prepare: whole and durable
    driver   decision ─► commit: each one moves to its final name

See `sink` for what a user gives, `committing` for the protocol and what proves an outcome.
"""
