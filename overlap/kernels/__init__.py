"""The engine: the mainloop of each architecture, its hooks, and its configuration."""
