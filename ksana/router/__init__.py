"""The Simple Router for prefill and decode on separate nodes. Not built yet."""
