"""The admin port: metrics, probes, decisions, and the switch. Sees everything, is on no request's path."""
