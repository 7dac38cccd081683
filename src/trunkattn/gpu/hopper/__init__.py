"""Kernels for Hopper cards, in Gluon, and the code that they share."""
