"""Attention with gradients, for training."""
