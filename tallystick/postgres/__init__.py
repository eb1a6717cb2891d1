"""PostgreSQL as a sink: rows by binary COPY, held back until the epoch is decided."""
