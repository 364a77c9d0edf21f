"""What RL and supervised runs share: start, optimizer step, stops and the final model."""
