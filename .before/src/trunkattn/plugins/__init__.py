"""Ways into the engines that people already run."""
