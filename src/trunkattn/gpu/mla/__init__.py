"""Latent attention (MLA) on a GPU: one cached row for the keys and the values of all heads."""
