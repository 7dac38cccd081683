"""Tools that compare two checkouts."""
