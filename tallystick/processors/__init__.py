"""A PySpark `StatefulProcessor` on our own state: the user's class unchanged, Rows or pandas."""
