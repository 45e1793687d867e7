"""The benchmark: the sidecar beside its peers, against stub engines, on one machine in one go."""
