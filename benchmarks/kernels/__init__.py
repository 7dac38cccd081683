"""Attention kernels: decoding, prompts, both at once, training, and how tiles are calibrated."""
