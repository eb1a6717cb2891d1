"""Expressions in Spark's SQL over Arrow columns: parsed in the driver, typed by the rows' schema.

`parsing` makes nodes of a text, `binding` a function of batches out of nodes and a schema; tasks
need no parser. `functions` and `casts` hold what there is, each with Spark's ANSI rules.
"""
