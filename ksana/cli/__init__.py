"""The `ksana` command."""
