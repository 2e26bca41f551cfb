"""Shared by all mainloops that load and store by TMA: shared memory, the producer, stores, exchanges, drawn tiles."""
