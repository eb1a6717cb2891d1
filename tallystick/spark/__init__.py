"""The Engine port for real, and what Spark users see: data source, session, query."""
