"""`make latency`: what prefill/decode disaggregation buys on real engines, and what the sidecar costs."""
