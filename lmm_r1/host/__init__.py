"""What builds on OpenRLHF and DeepSpeed: strategy, optimizer, checkpoints, and the replaced names."""
