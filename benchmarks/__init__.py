"""Comparisons with peers, each a command that prints a table. Ratios within one run, never absolutes."""
