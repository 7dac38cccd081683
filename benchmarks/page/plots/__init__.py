"""Plots of results, for the lab notes."""
