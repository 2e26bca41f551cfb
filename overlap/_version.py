"""The version of this library, where every floor can read it. pyproject.toml has the same."""

__version__ = "0.1.0.dev0"
