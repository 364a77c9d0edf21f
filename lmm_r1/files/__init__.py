"""Files that survive a kill: written whole or not at all, or a line at a time."""
