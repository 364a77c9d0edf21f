"""What stands in a run folder, an evaluation's files and tracking services: writers and readers side by side."""
