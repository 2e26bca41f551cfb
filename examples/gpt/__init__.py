"""The modules of examples/train.py: a small GPT, its text, training, checkpoints and curves."""
