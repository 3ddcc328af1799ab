"""The op tables: one TOML file per backend, and no code."""
