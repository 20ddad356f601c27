"""The journal: what actors were told and what they said, written down, and played back without a device."""
