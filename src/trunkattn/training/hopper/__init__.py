"""Training kernels for compute capability 9.0, in Gluon."""
