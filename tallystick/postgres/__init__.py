"""PostgreSQL as a participant: rows by binary COPY, held back until the epoch is decided."""
