"""What is chosen for a call, and how: a configuration from tables of measurements or a model, and fused or XLA.

It measures nothing (`overlap.tuning` does), and knows of no operation but by its name and sizes.
"""
