"""Pods in network namespaces behind a real Envoy: simulated engines, real sidecars."""
