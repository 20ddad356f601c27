"""Workloads: recorded ones, read lazily from files that may be hostile, and made-up ones from a seed."""
