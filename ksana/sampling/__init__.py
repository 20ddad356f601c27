"""Sampling parameters (pure), the noise behind randomness (pure), and the sampler (torch)."""
