"""`--workers`: one hub, which keeps what a pod has one of, and the processes that serve its port together."""
