"""Iceberg tables, by pyiceberg: `sink` is what a user gives, `table` what is read and committed."""
