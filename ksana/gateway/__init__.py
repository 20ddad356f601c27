"""HTTP in front of a `ksana.client.Client`: the OpenAI API, KsanaLLM's own /generate, health and metrics.

`ksana.gateway.app.create_app` makes the Quart application, `ksana.gateway.server.serve` listens for it.
Nothing here imports torch or knows an actor; a request becomes one call of `client.generate` per prompt.
"""
