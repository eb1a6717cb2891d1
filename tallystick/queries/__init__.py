"""Queries in SQL as pipelines: `ts.sql` translates a text into the steps that there are."""
