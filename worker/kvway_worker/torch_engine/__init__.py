"""The torch engine: a Hugging Face model whose keys and values live in our blocks."""

from kvway_worker.torch_engine.attention import AttentionOptions
from kvway_worker.torch_engine.engine import TorchEngine

__all__ = ["AttentionOptions", "TorchEngine"]
