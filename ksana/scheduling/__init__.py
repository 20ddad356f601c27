"""Pure: which requests compute what in the next step, and when a request is over."""
