"""The parts of examples/train.py."""
