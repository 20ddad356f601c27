"""What a simulated run is held against: scripts, invariants, what must be cached, whose turn it is."""
