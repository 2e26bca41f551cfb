"""Turns a kernel's equations, and its PTX, into instructions, and these into accesses of the state."""
