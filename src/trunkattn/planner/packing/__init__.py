"""Packing policies: which segments of a prefix forest are read together."""
