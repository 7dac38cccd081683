"""How the KV of a prefix forest is packed: which tokens are read together, and what a packing costs."""
