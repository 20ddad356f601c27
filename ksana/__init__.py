"""Ksana serves large language models: see README.md, and ARCHITECTURE.md for how."""
