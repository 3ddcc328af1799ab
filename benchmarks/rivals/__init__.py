"""What the step benchmark compares: ways to run the same model."""

LOW = ("float16", "bfloat16")  # what rivals on GPUs compute in
