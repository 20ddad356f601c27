"""The real actors on a seeded virtual clock, with a simulated device and simulated clients.

    python -m simulations run chat --report out/
    python -m simulations swarm --seeds 1000
    python -m simulations smoke --seed 1

Nothing here knows torch, threads, sockets or wall time. The same seed gives the same messages, bit for bit.
"""
