"""Other projects' kernels and engines on the same batches."""
