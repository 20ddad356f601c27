"""Many small random worlds with random faults, the shortest plan that fails, and wrong changes to notice."""
