"""Conversations with a checkpoint: in a terminal, line by line through a pipe, or over the OpenAI chat API."""
