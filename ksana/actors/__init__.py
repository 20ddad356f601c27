"""One actor per file: thin shells around the pure cores. None imports another."""
