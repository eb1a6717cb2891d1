"""Tables that agree with Kafka: files lie in the table's folder, and one commit names them.

    task     Parquet files, which no version of the table names ─► prepare
    driver   decision ─► the epoch is due (a small file) ─► one commit of the table for all due ones

`writing` is the task's side, `publishing` the protocol, `port` what a kind of table brings: Delta
(`delta`) and Iceberg (`iceberg`).
"""
