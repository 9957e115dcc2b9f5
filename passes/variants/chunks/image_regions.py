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

import operator
from math import prod

from torch import fx

from fxremat.core.constants import MOST_NODES
from fxremat.passes.joint_graph import JointGraph
from fxremat.passes.nodes import packet_name, shape_of
from fxremat.passes.variants.chunks.regions import (
    CallsCache,
    Region,
    add_between,
    avoided,
    drop_unread_views,
    kind_of_read,
    nbytes,
    readers,
)

INPUT = 0
"""Which result of ``aten.convolution_backward`` is the gradient of the input."""


def _is_convolution(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        call, place = node.args
        assert isinstance(call, fx.Node)
        return packet_name(call) == "convolution_backward" and bool(place == INPUT)
    return packet_name(node) == "convolution"


def _grow(region: Region, seed: fx.Node) -> None:
    """Big values over operands and readers; a convolution ends them in either direction."""
    region.kinds[seed] = "row"
    todo = [seed]
    while todo and len(region.kinds) <= MOST_NODES:
        node = todo.pop()
        sources = [] if _is_convolution(node) else region.operands(node)
        for source in sources:
            other = source.node
            is_new = source.kind == "row" and other not in region.kinds and region.is_big(other)
            if is_new and region.calls(other, "row"):
                region.kinds[other] = "row"
                todo.append(other)
        for reader in readers(node):
            kind = kind_of_read(region, reader, node)
            if kind is None or reader in region.kinds:
                continue
            region.kinds[reader] = kind
            if kind == "row" and region.is_big(reader) and not _is_convolution(reader):
                todo.append(reader)


def _region(
    joint: JointGraph, seed: fx.Node, position: dict[fx.Node, int], cache: CallsCache
) -> Region | None:
    shape = shape_of(seed)
    if shape is None or shape[0] < 2:
        return None
    region = Region(joint, shape[0], prod(shape[1:]), {}, position, convolution=seed, _calls=cache)
    if region.calls(seed, "row") is None:
        return None
    _grow(region, seed)
    add_between(region)
    drop_unread_views(region)
    if len(region.kinds) > MOST_NODES or not avoided(region):
        return None
    return region


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
        region = _region(joint, node, position, cache.setdefault(shape[0], {}))
        if region is not None and all(region.kinds != other.kinds for other in found):
            found.append(region)
    return found
