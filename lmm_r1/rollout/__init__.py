"""Generating responses with vLLM and having them scored."""
