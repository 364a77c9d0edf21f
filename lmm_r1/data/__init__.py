"""Rows of messages and images: the schema, how files are read into it, and how several files are blended."""
