"""PySpark's `StatefulProcessor`s, called row by row."""
