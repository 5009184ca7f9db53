"""Stand-ins that ship with the product: a clock moved by hand, a model of bytes, a replica."""
