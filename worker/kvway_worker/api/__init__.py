"""The worker's HTTP endpoints: from bytes to sequences, and from tokens back to bytes."""
