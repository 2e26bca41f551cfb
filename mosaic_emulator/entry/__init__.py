"""The ways in: `emulate`, the lowering of kernels on CPU devices, sequences of launches and their replay."""
