"""Rewards of responses: verifiers in process and over HTTP, user functions, reward models and their service."""
