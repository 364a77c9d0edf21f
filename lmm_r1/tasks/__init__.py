"""Procedural tasks: generators of rows with images whose answers are known, each under its name in `task`."""
