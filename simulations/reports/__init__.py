"""What a run leaves behind, in figures, charts and as a trace."""
