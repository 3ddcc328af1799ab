"""Decisions: what happens to each equation of a program, before any of it runs."""
