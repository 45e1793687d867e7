"""Where prefill endpoints are found out: a file, the DNS name of a headless Service, the Kubernetes API."""
