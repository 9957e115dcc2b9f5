"""Save the end of a short computation, not its beginning, where that takes no more memory.

A norm's statistics are small, and a plan keeps what the reduction wrote. The backward reads them
through a few elementwise ops that the forward has computed, too. Inductor would compute these again
for each element of each loop. So what the ops end in is saved in the place of what they begin with.

    forward   x -> var_mean -> var -> add -> rsqrt -> ...    saved: var,   then rsqrt
    backward  var -> add_inline -> rsqrt_inline -> ...       reads rsqrt
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence

from torch import fx

from fxremat.core.constants import NEGLIGIBLE_PART
from fxremat.passes.halves import INLINED
from fxremat.passes.joint_graph import is_tensor
from fxremat.passes.materialisation import is_fusable, is_reduction
from fxremat.passes.memory_estimation import nbytes


def save_ends(
    forward: Sequence[fx.Node], backward: Sequence[fx.Node], kept: Collection[fx.Node]
) -> None:
    """Have the ``backward`` of a graph read ends of what the ``forward`` computes; see the module.

    What is ``kept`` in memory anyway, as a result of the graph, is read as before.
    """
    before, behind = set(forward), set(backward)
    for node in forward:
        end: fx.Node | None = node if _is_statistic(node) else None
        while end is not None and end not in kept:
            end = _read_at_the_end(end, before, behind)


def _is_statistic(node: fx.Node) -> bool:
    call = node.args[0] if node.target is operator.getitem else node
    if not isinstance(call, fx.Node) or not is_tensor(node) or not is_reduction(call):
        return False
    read = max(
        (nbytes(one.meta["val"]) for one in call.all_input_nodes if is_tensor(one)), default=0
    )
    return nbytes(node.meta["val"]) <= NEGLIGIBLE_PART * read


def _read_at_the_end(
    node: fx.Node, forward: Collection[fx.Node], backward: Collection[fx.Node]
) -> fx.Node | None:
    """The one elementwise result in the place of ``node``, if the backward can read that alone."""
    readers = [one for one in node.users if one in backward]
    ends = [one for one in node.users if one in forward and _is_step(one, node)]
    end = next((one for one in ends if all(_is_copy(reader, one) for reader in readers)), None)
    if not readers or end is None or nbytes(end.meta["val"]) > nbytes(node.meta["val"]):
        return None
    for reader in readers:
        reader.replace_all_uses_with(end)
        reader.graph.erase_node(reader)
    return end


def _is_step(node: fx.Node, source: fx.Node) -> bool:
    """Whether a node is an elementwise op of one tensor."""
    return is_fusable(node) and not is_reduction(node) and node.all_input_nodes == [source]


def _is_copy(node: fx.Node, of: fx.Node) -> bool:
    same = (node.target, node.args, node.kwargs) == (of.target, of.args, of.kwargs)
    return same and INLINED in node.name
