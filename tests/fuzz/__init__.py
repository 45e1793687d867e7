"""Mutated input against everything that reads what others wrote; `python -m tests.fuzz`. See fuzz.py."""
