"""The prefix cache: blocks, their content, the order in which they go. Pure Python, no torch."""
