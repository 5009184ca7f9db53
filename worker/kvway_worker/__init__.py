"""The worker: one replica that serves a model from a paged KV cache shared between requests."""
