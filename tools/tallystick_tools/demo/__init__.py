"""Real flights through a pipeline that is killed again and again, then an audit."""
