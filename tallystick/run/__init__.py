"""The driver's side of epochs: the driver, its sinks, the loop and the handle of a pipeline."""
