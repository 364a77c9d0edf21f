"""The HTTP service: application, server, the pool of worker processes, limits, logs and metrics."""
