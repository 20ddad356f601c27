"""Models: what they are (`spec`, without torch), their weights, and one file per family."""
