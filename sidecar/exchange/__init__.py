"""One request's life without any I/O: what it may become, its failure table, and what is written into its JSON."""
