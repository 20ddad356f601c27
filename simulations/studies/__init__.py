"""Questions that take many runs: how much can be served, and which settings serve better."""
