"""Regions around a convolution: its result, and what is made of it element by element.

    x ── convolution ── c ── normalise, relu ── h ── convolution ── y
                        |-------- big --------|
    dx ── gradient ──── dc ── normalise' ──── dh ── gradient ────── dy

Rows are images. Such a region takes in what the result of one convolution is turned into, forward
and backward, up to the next convolutions: these read and give values that exist as a whole (x, y,
dx, dy). What is between (c, h, dh, dc) is computed a few images at a time, and again for each of
the loops: for mean and variance, for y, for what the gradient of a normalisation adds up, for dx.

So the convolution itself is computed several times, which is cheap where it has few channels to
read, as at the images, and there it is where values are largest. The gradient of its input is
computed twice, because what a normalisation's gradient adds up has to be known first.
"""

from __future__ import annotations

from fxremat.passes.joint_graph import JointGraph
from fxremat.passes.nodes import packet_name, shape_of
from fxremat.passes.variants.chunks.regions import CallsCache, Region, grow, is_worth_it, nbytes


def find_image_regions(joint: JointGraph) -> list[Region]:
    """The region around each convolution whose result is at least half as large as any value."""
    nodes = list(joint.module.graph.nodes)
    position = {node: i for i, node in enumerate(nodes)}
    calls = [node for node in nodes if node.op == "call_function"]
    least = max(map(nbytes, calls), default=0) / 2
    cache: dict[int, CallsCache] = {}
    found: list[Region] = []
    for node in calls:
        shape = shape_of(node)
        if packet_name(node) != "convolution" or shape is None or nbytes(node) < least:
            continue
        if shape[0] < 2:
            continue
        known = cache.setdefault(shape[0], {})
        region = grow(joint, node, shape[0], position, known, convolution=node)
        if is_worth_it(region) and all(region.kinds != other.kinds for other in found):
            found.append(region)
    return found
