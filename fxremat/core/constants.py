"""Numbers that were chosen and not derived, each with where it comes from.

They are those of passes, of operators that run, of costs and of whole steps. The planner and the
compiler have files of their own. What is a fact, such as the size of a block in a format or a
threshold of Inductor, stands where it is used.
"""

from __future__ import annotations

# --- passes --------------------------------------------------------------------------------

NEGLIGIBLE_PART = 1 / 16
"""What is this part of something, or less, does not matter beside it.

A formula: what a norm or the gradient of a bias reduces is a dimension of 16 or more, so its result
is at most this part of what it reads; an elementwise result is at least a quarter.
"""

CHUNK_PARTS = (8, 64)
"""A chunk is this part of all rows.

A value that is smaller than the smallest chunk of the largest value is not computed in chunks.

`benchmarks.rules`, a GPT with 50,257 words, CPU, at 45 %: (8, 64) adds -2.2 % of time in 119 MiB,
(4, 32) -4.0 % in 144 MiB, (16, 128) +1.5 % in 117 MiB, with the same least peak.
"""

TILE_BYTES = 2**22
"""Bytes of the widest value that are computed at a time between two matrix products, on a CPU.

A loop over 4 MiB moves 88 GB/s on one core of an AMD EPYC, over 8 MiB 15 GB/s: the second leaves
the cache (``torch.add`` into memory that is there).
"""

MOST_NODES = 400
"""Nodes that a pattern may take in before it is given up.

Where batches are rows whole networks hang together. The largest region in a GPT, a ResNet and a VGG
of `benchmarks.rules` has 26 nodes, so this bounds the time to compile and no plan.
"""

IMAGE_PARTS = (4, 16)
"""A convolution that takes much workspace may compute this part of a batch at a time.

`benchmarks.rules`, convolution_workspace on a U-Net, CPU: the least peak falls by 30 %. The plan
for the least peak without the rule adds 4 % of time, where recomputing alone adds 24 %.
"""

LEAST_ELEMENTS = 4096
"""Elements of a value that is worth saving in another form.

In the models of `benchmarks.rules`, sizes for a CPU, activations have 16,384 elements or more, and
statistics of norms 1,024 or fewer, which are not worth a call of 10 us (`CALL_US`).
"""

LOOSE_PACKING = 1.25
"""How many times the least bytes a packed mask may take, so that it is written in whole vectors.

A dimension of 28 or more, rounded up to a multiple of 8 bits, takes no more: 35 / 28.
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
