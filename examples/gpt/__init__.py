"""What examples/train.py is made of: a small GPT, its text, training, checkpoints and curves."""
