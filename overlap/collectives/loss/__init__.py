"""Losses of a vocabulary that is sharded over devices."""
