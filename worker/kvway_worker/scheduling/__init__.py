"""Which tokens of which requests a step computes, in which blocks. Pure Python, no torch."""
