"""What only a GPU can tell: `python -m overflow_lab.gpu_check` (or `make gpu`) checks and measures on CUDA.

The tests need no GPU; so each check here takes a device, and the tests run it on the CPU. See docs/gpu.md.
"""
