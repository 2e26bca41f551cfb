"""What mainloops share whose operands and results travel by TMA: shared memory, stores, exchanges, drawn tiles."""
