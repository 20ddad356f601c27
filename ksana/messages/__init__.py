"""What actors say to each other: frozen structs, and nothing else."""
