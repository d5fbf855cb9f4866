"""Native kernels against plain numpy, per instruction set."""
