"""Delta tables, by delta-rs: `sink` is what a user gives, `table` what is read and committed."""
