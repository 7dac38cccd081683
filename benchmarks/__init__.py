"""Benchmarks: scripts that measure, their results, and the pages that are written from them."""
