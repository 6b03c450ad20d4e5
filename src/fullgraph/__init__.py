"""Low-precision training in one graph."""
