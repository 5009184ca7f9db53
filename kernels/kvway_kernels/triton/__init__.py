"""Attention by Triton kernels, for CUDA devices. Needs the package `triton`.

Never run on a GPU so far: tested in Triton's interpreter on a CPU, and compiled ahead of time for
sm_90. See docs/decisions/0016.
"""
