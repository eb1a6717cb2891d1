"""Every option of the source and the sink: parsed, typed, with its default."""
