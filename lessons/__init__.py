"""Lessons: one matmul in eight versions for Hopper, and in seven for Blackwell, each with one idea more than the last.

They import `overlap`'s primitives and a few functions of its kernels. The library itself uses none of them.
"""
