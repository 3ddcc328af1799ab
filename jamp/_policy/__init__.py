"""Policies: rules, tables of them, and functions as their entries."""
