"""What an operator types: tools that look at a pipeline's checkpoint from outside."""
