"""A recorded run once more, with other settings: what the scheduler would have done instead."""
