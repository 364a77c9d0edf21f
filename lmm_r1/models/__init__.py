"""Models driven by a kit."""
