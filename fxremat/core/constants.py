"""Numbers that were chosen and not derived, each with where it comes from.

They are those of passes, of operators that run, of costs and of whole steps. The planner and the
compiler have files of their own. What is a fact, such as the size of a block in a format or a
threshold of Inductor, stands where it is used.
"""

from __future__ import annotations

# --- passes --------------------------------------------------------------------------------

NEGLIGIBLE_PART = 1 / 16
"""What is this part of something, or less, does not matter beside it.

`benchmarks.rules` (unet and vgg, CPU): with 1/8 and with 1/32 the least peaks differ by less than
0.5 %, which is where that benchmark sees no difference.
"""

CHUNK_PARTS = (8, 64)
"""A chunk is this part of all rows, and what is smaller than the smallest chunk of the largest
value is not computed in chunks.

`benchmarks.rules`, chunked_loss on a GPT with 50,257 words: the least peak falls by 77 %.
"""

MATMUL_ROWS = 16
"""Rows of a matrix that are worth a matrix product, and of which a GPU's chunk has a multiple.

The tensor cores' instruction for 16-bit numbers, mma.m16n8k16 in NVIDIA's PTX, takes 16 rows.
Sixteen rows of any type are aligned to the 16 bytes that generated kernels expect.
"""

TILE_BYTES = 2**22
"""Bytes of the widest value that are computed at a time between two matrix products, on a CPU.

A loop over 4 MiB moves 88 GB/s on one core of an AMD EPYC, over 8 MiB 15 GB/s: the second leaves
the cache (``torch.add`` into memory that is there).
"""

MOST_NODES = 400
"""Nodes that a pattern may take in before it is given up.

Where batches are rows whole networks hang together. The largest region of the models of
`benchmarks.rules` has fewer than 100 nodes, so this bounds the time to compile and no plan.
"""

LEAST_ELEMENTS = 4096
"""Elements of a value that is worth saving in another form.

Its encoding is a call of about 10 us (`CALL_US`), in which a CPU copies about as many numbers
eight times (TILE_BYTES has the rate).
"""

MOST_MASK_ELEMENTS = 2**24
"""Elements of a mask that is computed while compiling, to see which weights it leaves.

It is a mask of 4,096 tokens by as many: 64 MiB in float32.
"""

# --- operators that run --------------------------------------------------------------------

CALL_US = 10.0
"""Microseconds that Python takes for one of the calls that a call makes inside.

``torch.ops.aten.add.Tensor`` on 8 numbers takes 8.5 us on an AMD EPYC, ``torch.add`` 11.
"""

CACHE_SPEED = 4
"""How many times faster than memory a loop in the cache is taken to be, for the time of a call.

It lies between loops that move (12 times on an AMD EPYC, see TILE_BYTES) and loops that compute.
"""

KERNEL_ROW_BYTES = 64
"""Bytes of a row that a kernel between two matrix products may take beyond what is set aside.

Sixteen numbers of four bytes: maxima, sums, labels and places. Kernels are counted exactly when
they are there, so more would not break a budget, and less would only run operator by operator.
"""

LEAST_FLOPS = 10**11
"""On a GPU a call of fewer operations computes all rows, ignored ones too.

It is over in a third of a millisecond at 312 TFLOPS, the A100's published rate in 16 bits. To
leave rows out the host waits for the device, and about thirty launches of 10 us are late.
"""

GPU_PIECE_ELEMENTS = 2**22
"""Elements that one pass over a piece of a tensor takes on a GPU.

In 16 bits they are read and written in 8 us at the A100's published 2 TB/s, which is a launch.
"""

STEPS_AHEAD = 4
"""Optimizer steps that may be left to do while the backward goes on: their gradients are in memory.

Two modules with a weight and a bias each: one whose gradients arrive, one whose steps run.
"""
