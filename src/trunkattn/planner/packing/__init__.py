"""How the KV of a prefix forest is packed: which segments are read together, and what a packing costs."""
