"""Files that survive a kill: written completely or not at all, or line by line."""
