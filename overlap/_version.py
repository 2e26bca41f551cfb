"""The version of this library; pyproject.toml has it as well."""

VERSION = "0.1.0.dev0"
