"""What the step benchmark compares: ways to run the same model."""
