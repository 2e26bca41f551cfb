"""What every operation goes through around its kernel: activations, scales, derivatives, sharded operands."""
