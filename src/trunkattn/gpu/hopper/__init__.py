"""Kernels for Hopper cards, in Gluon, and what they share."""
