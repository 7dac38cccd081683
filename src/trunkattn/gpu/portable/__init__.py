"""Portable GPU kernels, in Triton."""
