"""Benchmarks, one file each: `python -m benchmarks NAME [--json FILE]`."""
