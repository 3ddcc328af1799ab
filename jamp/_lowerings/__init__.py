"""What an equation becomes on a backend and a processor, in dtypes that are decided."""
