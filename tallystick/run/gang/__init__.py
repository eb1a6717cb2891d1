"""The work of a resident task on an order."""
