"""Batch inference: a file of rows in; responses, their scores and what is selected from them out."""
