"""Delta tables that agree with Kafka: files lie in the table's folder, and one commit names them.

    task     Parquet files, which no version of the table names ─► prepare
    driver   decision ─► the epoch is due (a small file) ─► one Delta commit for all that is due

See `sink` for what a user gives, `publishing` for the protocol, `table` for what is refused.
"""
