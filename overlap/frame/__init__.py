"""What every operation goes through around its kernel: activations, derivatives, sharded operands."""
