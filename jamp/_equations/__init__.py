"""Equations of a program: walking over them, telling equal ones, binding them."""
