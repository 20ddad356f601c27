"""What an executor drives: a worker process, the same inline, or a simulated one."""
