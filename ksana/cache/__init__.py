"""Pure: block pools, prefix tree, sliding-window entries, remote-loading states, their checks."""
