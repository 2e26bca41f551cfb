"""The engine of all products: the mainloop of each architecture, its hooks, and its configuration."""
