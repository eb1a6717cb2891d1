"""The shells that run epochs: the loop, the driver, the tasks; over the ports only."""
