"""What runs a pipeline's epochs, one after the other: shells over the ports."""
