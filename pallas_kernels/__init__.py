"""Pallas kernels, each beside a plain JAX reference of the same signature.

None is written yet. Each will stand in a file or folder of its own, exported here.
"""

__all__: list[str] = []
