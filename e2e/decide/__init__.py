"""`make decide`: mixed load on real engines, by the sidecar's decisions and by the static rules of others."""
