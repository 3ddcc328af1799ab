"""Loss scaling: the scaler, its form for optax, and metrics."""
