"""Local or remote: the guards, in order. Later rules (cost, cached prefix) join them here."""
