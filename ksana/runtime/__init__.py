"""How actors live: mailboxes, slots, activations, supervision, clocks, frames. Knows no tokens."""
