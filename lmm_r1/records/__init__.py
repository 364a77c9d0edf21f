"""Run folders, evaluation files and tracking services: how they are written and read."""
