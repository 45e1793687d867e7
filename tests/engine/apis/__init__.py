"""The HTTP APIs of vLLM 0.32, one file each: what is refused, and the exact JSON and SSE of what is answered."""
