"""Attention over a paged KV cache. It knows tensors and nothing else of kvway."""
