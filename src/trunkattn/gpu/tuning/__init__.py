"""Tiles and card records: what was fitted for each card."""
