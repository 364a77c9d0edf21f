"""Supervised trainers: SFT, preference training, reward models, distillation."""
