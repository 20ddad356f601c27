"""Remote cache stores: where KV blocks lie outside this process (filesystem, Redis, simulated)."""
