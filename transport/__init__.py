"""Everything over ZMQ: the NIXL handshake (codec, prober, relay) and KV events. Knows nothing of HTTP."""
