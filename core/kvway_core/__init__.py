"""What the kvway router and worker must agree on: hashes, events, prompts, the wire, errors."""
