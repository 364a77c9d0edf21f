"""The reward service: pure scoring functions, a worker pool, an HTTP app and its client."""
