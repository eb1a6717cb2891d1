"""Parquet files that appear when their epoch is decided, on local disks and object stores.

    task     drafts in a hidden folder ─► prepare: whole and durable
    driver   decision ─► commit: each one moves to its final name

See `sink` for what a user gives, `drafts` for the protocol and what proves an outcome.
"""
