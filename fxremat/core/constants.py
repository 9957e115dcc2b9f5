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
is at most this part of what it reads; an elementwise result is at least a quarter. A mask of
dropout reads a seed, and a cast between float32 and bfloat16 at least half of what it writes.
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

FEW_BIT_GRID = (10.0, 1024)
"""The grid on which a derivative is saved in few bits: how far it reaches from 0, and its points.

A formula: SiLU's derivative differs from 1 by about (x - 1) exp(-x), which is below `MEASURABLE`
from 6.3 on; steps of 0.02 are small beside 1.76, the width of tanh's derivative at half its height.
"""

LOOSE_PACKING = 1.25
"""How many times the least bytes a packed mask may take, so that it is written in whole vectors.

A dimension of 28 or more, rounded up to a multiple of 8 bits, takes no more: 35 / 28.
"""

MOST_MASK_ELEMENTS = 2**24
"""Elements of a mask that is computed while compiling, to see which weights it leaves.

It is a mask of 4,096 tokens by as many: 64 MiB in float32.
"""

# --- planning ------------------------------------------------------------------------------

ROUNDS = 4
"""How often something is planned or chosen anew by what came of it the last time.

It is how many times the last step down the next one may be, too: the way to the least peak of a
small ResNet took 13 dry runs with short steps, and 7 with these. It bounds the guesses of a largest
size that fits: the secant method multiplies the last two errors, so four lead from one half to
0.4 %. In the planner it bounds the programmes with more and more rows: `benchmarks.planner`, with 5
for the choice of variants and 3 for strict bounds, has the same plans.
"""

# --- operators that run --------------------------------------------------------------------

CALL_US = 10.0
"""Microseconds that Python takes for one of the calls that a call makes inside, or for a transfer.

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

# --- costs ---------------------------------------------------------------------------------

TIME_DOUBT = 0.03
"""The part by which a time of a call may be wrong.

A call is timed until its two quickest runs differ by no more, which is small beside the quarter by
which clocks move times and `fxremat.cost.timing` corrects. A variant has to save more than the sum
of such parts: two times of one call, taken on different occasions, differ by 5 %, those of a step
of many calls by less.
"""

CORE_TURN_S = 0.01
"""Programs that share a core have had a turn each in so many seconds.

They take it from each other at least every 8 ms (two turns of 4 ms). So four times this are ten
turns, after which timing ends, and ten looks in it find what a program allocates.
"""

MOST_WAITING = 1 / 4
"""A call that waited for a core in a larger part of each run is not timed at all.

Clocks move times by a quarter, too (`TIME_DOUBT`). Beyond it plans by the figures of a usual device
are better: those by such times compute all in the smallest parts (`fxremat.cost.timing`).
"""

PEAK_REACHED = 0.65
"""The part of a GPU's published operations per second that its kernels are taken to reach.

FlashAttention-2 reaches 50 to 73 % of an A100's peak (Dao, arXiv 2307.08691), and large matrix
products more.
"""

MEASURABLE = 0.01
"""Of a time, a peak or a value: a smaller difference counts as none.

The step times of docs/benchmarks.md differ by more than that from run to run.
"""

OUT_OF_REACH = 1.1
"""Times the aim, or the least that is planned: a plan above it is not tried, since its dry run
would have to take a tenth less than planned. Other plans of low peak aim at so many times the
least, and at the square of it: the local search decides by the bytes it is given."""

# --- memory of graphs ----------------------------------------------------------------------

PARTS_OUTSIDE = (0.0, 0.02, 0.15, 0.3)
"""Parts of the peak that are kept outside of an arena, one after the other.

ResNet-50 and ConvNeXt on an H200, at 60 %, leave 29 and 6 % unused with all in the arena, 1.5 and
0.5 % with these (`benchmarks.arena`).
"""

FIRST_SEGMENTS = (1.0, 1.01, 1.02, 1.04, 1.08, 1.16)
"""Times the bytes that a private pool needs: first segments to choose from. Best fit leaves 0.8 to
6.2 % of a pool unused on the recorded steps, and more where it is small beside its blocks."""

LITTLE_UNUSED = 0.005
"""Of what is alive: with so little unused in an arena, nothing is looked for that may leave less. A
formula: half of `MEASURABLE`."""

MUCH_UNUSED = 0.05
"""Of a budget: with more of it unused, a step that recomputes is planned once more. A formula: five
times `MEASURABLE`, as another compilation has to be worth it."""

# --- compiling kernels ---------------------------------------------------------------------

MOST_TOGETHER = 8
"""C++ kernels in one source.

Most of a kernel's compilation goes to headers, of which eight kernels leave an eighth to each; with
more, the last one comes late.
"""

MOST_READY = 64
"""Graphs whose code was generated ahead and is kept until Inductor comes to them.

A compilation has two, and one for each small kernel; a backward that never runs leaves its own. So
this bounds memory, and no compilation.
"""

STEPPED_ALIKE = 3
"""Weights of one shape that step where the memory of an optimizer's step is asked for: where
weights step in turn, two that follow each other may overlap, and a third adds nothing; where all
step at once, the third shows what each of them adds."""
