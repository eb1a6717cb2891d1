"""The work of a resident task on an order, whoever gives it."""
