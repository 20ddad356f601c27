"""The real actors on a seeded virtual clock, with a simulated device and simulated clients.

    python -m simulations run chat --report out/
    python -m simulations swarm --seeds 1000
    python -m simulations smoke --seed 1

A run: `scenario` says what, `world` wires engines (`engine`, `executor`, `frontend`), links, store and
`faults`, `workloads` ask, `checks` hold it against the promises, `reports` show it. Many runs: `swarm` looks
for seeds that break a promise, `studies` for capacities and differences. `smoke` and `hit_rates` run whole
engines, tokenizer and all.

Nothing here knows torch, threads, sockets or wall time. The same seed gives the same messages, bit for bit.
"""
