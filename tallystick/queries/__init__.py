"""Queries in SQL as pipelines: `ts.sql` translates a text into the steps that there are."""

from tallystick.expressions.parsing import parser

parser()  # the modules import sqlglot; an error that names the extra comes first
