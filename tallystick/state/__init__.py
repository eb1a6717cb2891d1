"""KEYS → KEY GROUPS → STATE: who owns a key, how its state is laid out, what files hold it."""
