"""The worker's side of epochs: tasks that read, keep state and write, and the plans for them."""
