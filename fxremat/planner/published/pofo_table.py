"""POFO's dynamic programme over the blocks of a chain: keep, recompute or send to the host.

Beaumont, Eyraud-Dubois and Shilova, "Efficient Combination of Rematerialization and Offloading
for Training DNNs" (NeurIPS 2021), the dynamic programme. A state in front of block i says what
the blocks before it leave behind:

* ``kept``: bytes of theirs that stay on the device until their backward (the paper's A);
* ``leaving``: microseconds of transfers to the host that wait when the forward of block i starts
  (its delta F, as time);
* ``coming``: microseconds of transfers to the device that must have ended when the backward of
  block i has (its delta B): the backward of the blocks before it has no time for them;
* ``x``: whether the value that enters block i is held for block i-1 in any case.

From there block i runs in one of its `Ways`; or the blocks i..j run and hold nothing but the
value that enters i, which is kept or sent, and come back as Rotor makes them within the bytes
that are left. Where bytes run short the ops wait for transfers; they also wait for all that is
still to be moved at the turn. The last blocks may be left to Rotor altogether: if they are all
blocks that is the answer without transfers. What is minimised is ``added``, the time beyond that
of running every op once.

A state has the exact figures of one answer, and slots of bytes and time only serve to forget
states: of those in the same slots the best stays, if no other is better in every respect. So
slots may be coarse, as what is rounded does not add up over many blocks. All states of a block
are arrays, and a case for all of them is one array operation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fxremat.core.problem import Copies
from fxremat.core.timeline import transfer_us
from fxremat.planner import constants
from fxremat.planner.deadline import Deadline
from fxremat.planner.published.rotor import PAID, PAY, Table

Row = npt.NDArray[np.float64]
Index = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Column = npt.NDArray[Any]
Slots = tuple[int, ...]
RECOMPUTE, SEND_AND_RECOMPUTE, REST = -1, -2, -3
"""Decisions that are no way of a block: `REST` leaves all further blocks to Rotor."""


class Ways(NamedTuple):
    """The ways to run one block, an entry of every array for each.

    Bytes are those at the worst step of the forward and of the backward, those that stay in
    between, and those that are sent. ``out`` and ``back`` are the transfers of the block's own
    values, ``out_left`` and ``back_left`` what remains of them after its forward, and before its
    backward, if nothing else moves. ``paid`` is 1 where the value that leaves is held for this
    block: then it is the next one that keeps or sends it.
    """

    added: Row
    forward: Row
    backward: Row
    forward_bytes: Row
    backward_bytes: Row
    kept: Row
    sent: Row
    out: Row
    out_left: Row
    back: Row
    back_left: Row
    paid: Row


class States(NamedTuple):
    """States in front of one block, and where each comes from: a decision in a state before."""

    kept: Column
    sent: Column
    leaving: Column
    coming: Column
    added: Column
    block: Column
    x: Column
    state: Column
    choice: Column
    slots: Column

    def take(self, which: Index) -> States:
        """Some of the states."""
        return States(*(column[which] for column in self))


@dataclass(frozen=True)
class Decision:
    """A way of block i = j, or what becomes of the blocks i..j; ``slots`` are for Rotor."""

    i: int
    j: int
    x: int
    choice: int
    slots: int


class _End(NamedTuple):
    """An answer: the state it ends in, in front of a block that is left to Rotor, if any."""

    added: float
    block: int
    x: int
    state: int
    slots: int


class Programme:
    """The programme of one chain; ``ways[i][x]`` are those of block i.

    Answers are within the budget, and add no more time than so much.
    """

    def __init__(
        self, segments: Table, ways: Sequence[Sequence[Ways]], copies: Copies, budget: float,
        most_added: float, deadline: Deadline,
    ) -> None:  # fmt: skip
        self.segments, self.ways, self.copies = segments, ways, copies
        self.budget, self.most_added = budget, most_added
        cap = copies.host_bytes
        self.most_sent = np.inf if cap is None else float(cap)
        self.count = len(ways)
        first = [cost.options[0] for cost in segments.costs]
        base = [option.first.time + option.backward.time for option in first]
        self.base = np.array([0.0, *np.cumsum(base)])
        held = sum(option.held for option in first)
        self.capped = self.most_sent < held + sum(cost.enters for cost in segments.costs)
        # Where states are compared a byte is worth the time of the forward for each that is held.
        self.price = float(segments.times[1][-1]) / max(1, held)
        self.found: list[dict[int, list[States]]] = [{} for _ in range(self.count + 1)]
        self.states: list[dict[int, States]] = [{} for _ in range(self.count + 1)]
        self.ends: list[_End] = []
        none, zero = np.zeros(1), np.zeros(1, dtype=np.int64)
        self.found[0][PAY] = [States(none, none, none, none, none, zero, zero, zero, zero, zero)]
        for i in range(self.count + 1):
            if not deadline.running():
                break
            self._step(i)

    def answers(self, most: int) -> Iterator[list[Decision]]:
        """The decisions of the best answers, from the first block on."""
        ends: dict[tuple[int, int, int], _End] = {}
        for end in sorted(self.ends, key=lambda end: end.added):
            ends.setdefault((end.block, end.x, end.state), end)
        for end in [*ends.values()][:most]:
            _, block, x, at, slots = end
            out = [Decision(block, self.count - 1, x, REST, slots)] if block < self.count else []
            while block:
                here, last = self.states[block][x], block - 1
                choice, slots = int(here.choice[at]), int(here.slots[at])
                block, x, at = int(here.block[at]), int(here.x[at]), int(here.state[at])
                out.append(Decision(block, last, x, choice, slots))
            yield out[::-1]

    # -- the cases -------------------------------------------------------------------------

    def _step(self, i: int) -> None:
        """All decisions in the states in front of block i."""
        for x, parts in self.found[i].items():
            states = self._best(States(*map(np.concatenate, zip(*parts, strict=True))))
            self.states[i][x] = states
            if i == self.count:
                for part in (1.0, 0.0):
                    added = states.added + part * states.leaving + states.coming
                    self._end(i, x, added, states.slots)
                continue
            self._rest(i, x, states)
            self._run(i, x, states)
            self._recompute(i, x, states, sent=False)
            if self.segments.costs[i].enters:
                self._recompute(i, x, states, sent=True)
        self.found[i].clear()

    def _add(self, target: int, x: int, good: Mask, columns: Sequence[Any]) -> None:
        """Note the good ones of new states in front of a block; columns are those of `States`."""
        if good.any():
            whole = (np.broadcast_to(column, good.shape)[good] for column in columns)
            self.found[target].setdefault(x, []).append(States(*whole))

    def _run(self, i: int, x: int, states: States) -> None:
        """Block i in each of its ways."""
        ways = Ways(*(column[:, None] for column in self.ways[i][x]))
        room = self.budget - ways.forward_bytes - states.kept
        room_back = self.budget - ways.backward_bytes - states.kept
        left = np.minimum(states.leaving, room / self.copies.to_host)
        need = np.minimum(states.coming, room_back / self.copies.to_device)
        waits = (states.leaving - left) + (states.coming - need)
        added = states.added + ways.added + waits
        sent = states.sent + ways.sent
        good = (room >= 0) & (room_back >= 0) & (sent <= self.most_sent)
        good &= added <= self.most_added
        columns = (
            states.kept + ways.kept,
            sent,
            np.maximum(left + ways.out - ways.forward, ways.out_left),
            np.maximum(need + ways.back - ways.backward, ways.back_left),
            added,
            *(i, x, np.arange(len(states.added)), np.arange(len(ways.added))[:, None], 0),
        )
        for paid in (PAY, PAID):
            self._add(i + 1, paid, good & (ways.paid == paid), columns)

    def _recompute(self, i: int, x: int, states: States, sent: bool) -> None:
        """The blocks i..j hold only the value that enters i, for every j before the last."""
        table, copies = self.segments, self.copies
        stop = min(i + constants.FEW_OPS, self.count - 1)
        if stop <= i:
            return
        enters = table.costs[i].enters
        stays, leaves = (0, enters) if sent else (enters, 0)
        out = transfer_us(copies, "to host", enters) if sent else 0.0
        back = transfer_us(copies, "to device", enters) if sent else 0.0
        takes, needs, lag = self._skips(i, stop, leaves, out)
        early = (table.early[i + 1 : stop + 1] - table.early[i])[:, None]
        base = (self.base[i + 1 : stop + 1] - self.base[i])[:, None]
        room = self.budget - states.kept - stays
        queue = states.leaving + out
        left = np.minimum(queue, (room - lag) / copies.to_host)
        memory = self.budget - states.kept - early - (enters if x == PAID else 0)
        rows = table.best[x, i, i:stop]
        spare = memory - np.isfinite(rows).argmax(axis=1)[:, None] * table.slot
        need = np.minimum(states.coming, spare / copies.to_device)
        slots = self._slots(memory - need * copies.to_device)
        again = np.take_along_axis(rows, slots, axis=1)
        waits = (queue - left) + (states.coming - need)
        added = states.added + takes + again - base + waits
        good = (room >= needs) & (spare >= 0) & (added <= self.most_added) & np.isfinite(added)
        good &= states.sent + leaves <= self.most_sent
        choice = SEND_AND_RECOMPUTE if sent else RECOMPUTE
        columns: tuple[Any, ...] = (
            states.kept + early + stays,
            states.sent + leaves,
            np.maximum(left - takes, 0.0),
            np.maximum(need - again, 0.0) + back,
            added,
            *(i, x, np.arange(len(states.added)), choice, slots),
        )
        for row in range(stop - i):
            picks = [column[row] if np.ndim(column) == 2 else column for column in columns]
            self._add(i + row + 1, PAY, good[row], picks)

    def _skips(self, i: int, stop: int, leaves: int, out: float) -> tuple[Row, Row, Row]:
        """Running the blocks i..j so that nothing is held, for each j: time, bytes, and bytes
        less those that have left since the start.

        The value that enters counts where it leaves: as bytes until its block has run, and as
        part of what waits.
        """
        table = self.segments
        time = table.times[1][i : stop + 1] - table.times[1][i]
        needs = np.array([float(cost.unsaved.first.whole) for cost in table.costs[i:stop]])
        needs += table.early[i:stop] - table.early[i]
        needs[0] = table.costs[i].unsaved.first.apart + leaves
        gone = time[:-1] * self.copies.to_host
        gone[0] = out * self.copies.to_host
        worst, lag = np.maximum.accumulate(needs), np.maximum.accumulate(needs - gone)
        return time[1:, None], worst[:, None], lag[:, None]

    def _rest(self, i: int, x: int, states: States) -> None:
        """The blocks from i on by Rotor, while transfers of those before go on, or wait."""
        table, copies = self.segments, self.copies
        row = table.best[x, i, -1]
        memory = self.budget - states.kept - (table.costs[i].enters if x == PAID else 0)
        forward = table.times[1][-1] - table.times[1][i]
        least = table.best[x, i, -1, -1] - forward
        base = self.base[-1] - self.base[i]
        for out in (0, 1):
            for back in (0, 1):
                moving = np.maximum(
                    out * states.leaving * copies.to_host, back * states.coming * copies.to_device
                )
                slots = self._slots(memory - moving)
                takes = np.where(memory >= moving, row[slots], np.inf)
                waits = np.maximum(states.leaving - out * forward, 0.0)
                waits += np.maximum(states.coming - back * least, 0.0)
                self._end(i, x, states.added + takes - base + waits, slots)

    def _end(self, i: int, x: int, added: Row, slots: Index) -> None:
        """Note the best answers that end in these states."""
        for at in map(int, np.argsort(added, kind="stable")[:3]):
            time = float(added[at])
            if time <= self.most_added and time < np.inf:
                self.ends.append(_End(time, i, x, at, int(slots[at])))

    def _slots(self, nbytes: Row) -> Index:
        """Slots of Rotor's table that so many bytes are."""
        slots: Index = (nbytes / self.segments.slot).astype(np.int64)
        return slots.clip(0, self.segments.slots)

    # -- which states stay -----------------------------------------------------------------

    def _best(self, states: States) -> States:
        """The states that stay with so many slots that they are not too many."""
        slots: Slots = constants.SLOTS if self.capped else (*constants.SLOTS[:3], 1)
        found = self._fronts(states, slots)
        while (count := len(found.added)) > constants.MOST_STATES:
            part = (constants.MOST_STATES / count) ** (1 / len(slots))
            slots = tuple(max(1, int(part * number)) for number in slots)
            found = self._fronts(found, slots)
        return found

    def _fronts(self, states: States, slots: Slots) -> States:
        """The best state of each slot, if no slot that is less in every respect has a faster one.

        The best is the fastest once bytes are paid for, kept or waiting. Without that, states
        would stay that are a little faster and have a little more of all the rest, which does add
        up.
        """
        where = (
            _even(states.kept, slots[0]),
            _even(np.sqrt(states.leaving), slots[1]),
            _even(np.sqrt(states.coming), slots[2]),
            _even(states.sent, slots[3]),
        )
        key = np.ravel_multi_index(where, slots)
        moving = states.leaving * self.copies.to_host + states.coming * self.copies.to_device
        first = _least_of_each(key, states.added + self.price * (states.kept + moving), slots)
        fastest = np.full(slots, np.inf)
        fastest.reshape(-1)[key[first]] = states.added[first]
        others = _less(fastest).reshape(-1)[key[first]]
        return states.take(first[states.added[first] < others])


def _even(column: Row, count: int) -> Index:
    """The slot of each entry, of so many even ones from the least to the most."""
    low, high = float(column.min()), float(column.max())
    if high <= low:
        return np.zeros(len(column), dtype=np.int64)
    return np.minimum(((column - low) * (count / (high - low))).astype(np.int64), count - 1)


def _least_of_each(key: Index, worth: Row, slots: Slots) -> Index:
    """For each key that there is, the first place with the least worth."""
    least = np.full(slots, np.inf).reshape(-1)
    np.minimum.at(least, key, worth)
    places = np.flatnonzero(worth <= least[key])
    return places[np.unique(key[places], return_index=True)[1]]


def _less(grid: Row) -> Row:
    """The least of all other entries that are no further along any axis."""
    others = np.full(grid.shape, np.inf)
    for axis in range(grid.ndim):
        grid = np.minimum.accumulate(grid, axis=axis)
    for axis in range(grid.ndim):
        ahead, behind = [slice(None)] * grid.ndim, [slice(None)] * grid.ndim
        ahead[axis], behind[axis] = slice(1, None), slice(None, -1)
        part = others[tuple(ahead)]
        np.minimum(part, grid[tuple(behind)], out=part)
    return others
