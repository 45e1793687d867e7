"""OpenTelemetry spans of requests, written from what the exchange recorded. Is on no request's path when off.

Why not the SDK: it brings twelve packages and a thread that takes the interpreter from the loop; what is needed of
it is one JSON document with a published form, sent by the HTTP client that is here anyway.
"""
