"""What RL and supervised training have in common."""
