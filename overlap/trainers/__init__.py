"""Adapters for trainers, each imported by itself (docs/trainers.md): maxtext.py, levanter.py."""
