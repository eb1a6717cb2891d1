"""3. Rows become committables: partitioned, produced, and described well enough to be checked."""
