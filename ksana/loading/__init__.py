"""Loading prefixes from a remote store: everything that decides. Pure: no trio, no torch, no I/O."""
