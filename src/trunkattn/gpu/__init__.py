"""The GPU backend: plans on the device, launches, and the kernels of each kind of card."""
