"""Prefill/decode routing sidecar for vLLM. The rooms are described in docs/architecture.md."""

__version__ = "0.1.0"
