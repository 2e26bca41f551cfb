"""Programs to start from. A package, so that benchmarks/ can import `plain_layers`."""
