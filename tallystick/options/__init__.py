"""Every option of the source: parsed, typed, with its default."""
