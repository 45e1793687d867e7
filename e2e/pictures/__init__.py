"""Pictures of the documentation, taken from a real run: `python -m e2e.pictures`."""
