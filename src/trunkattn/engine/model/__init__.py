"""A Hugging Face model on this machine: its files, whether it can run, its weights, and its attention."""
