"""The families of fused GEMM kernels: what each may be, and what its problems may ask of it.

slabs.py   persistent kernels, which tile the rows of one rank or a few:  sm90.py  sm80.py
flat.py    kernels that tile the rows of all ranks as one:  sm90_flat.py  sm80_flat.py
"""
