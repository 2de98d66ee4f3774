"""Benchmarks: ratios side by side, one command each."""
