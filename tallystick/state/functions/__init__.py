"""Functions of keyed steps, over columns: ready-made ones and those of users."""
