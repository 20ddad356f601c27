"""Pure: how long a step takes."""
