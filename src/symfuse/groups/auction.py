"""The permutation that maximises a sum of scores, exactly and fast: an auction, then shortest paths, then a proof.

Columns have prices. A row bids for the column of the best net value (score − price) and raises its price to where the
row would rather have its second best (Bertsekas 1979); prices only rise. Three things make it fast on the scores of
networks:

- A row looks at a short list of its best columns. As prices only rise, no other column comes to be worth more than when
  the list was made; the list is good until its second best is worth less than that, and is then made anew.
- In each phase a bid goes ε higher than it must, which ends wars over alike columns; ε falls from phase to phase, and
  is raised within one that takes long.
- The last ε is 0, and the rows that are still without a column get theirs along shortest augmenting paths (Dijkstra's
  on reduced scores, as Jonker & Volgenant 1987), on the same lists: a row looks at all columns where its list may miss
  one that matters.

Whatever came before, the result is proved: by linear duality no permutation scores more than Σᵢ maxⱼ (s − price) + Σ
price. The scores are read as they are (float32 or float64), all arithmetic is in float64 and in one thread, which holds
no lock of the interpreter. Beside the scores it takes about 700 bytes a row.

Importing this module imports numba (the extra `fast`); the first call compiles for some seconds, and what is compiled
is kept in a folder. Measurements: docs/decisions/assignment.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from numba import njit
from numpy.typing import NDArray

Scores = NDArray[np.float32] | NDArray[np.float64]
F = TypeVar("F", bound=Callable[..., Any])

LISTED = 48  # columns of a list at most; half of them at least
_PARTS = 256  # of a row, whose maxima tell which parts have columns for its list
# Powers of two, so that small integers stay exact; in units of what separates the columns of a list.
_FIRST, _LAST, _FALL, _RISE = 2.0**-7, 2.0**-13, 8.0, 4.0
_TRIES = 4  # bids per row until the phase with ε = 0 is abandoned
_SOON, _LATE = 4, 16  # scores looked at, in matrices, until ε is raised: in the first phase, and in later ones
_BUDGET = 256  # scores looked at, in matrices; the hardest kinds that we know took less than 100


def solve(scores: Scores, budget: float = _BUDGET) -> NDArray[np.int64] | None:
    """argmax over permutations p of Σᵢ scores[i, p[i]], [n, n], finite and contiguous; or None, if it was not solved
    within the budget (scores looked at, in matrices) or not proved.

    The same each time for the same scores; of several optima, one.
    """
    n = len(scores)
    if n < 2:
        return np.arange(n)
    matrix = n * max(n, LISTED)
    s = _State.of(scores, budget * matrix)
    tries = matrix + _TRIES * LISTED * n
    _auction(scores, s, 0.0, tries)
    spread = s.values.max(1) - s.limit
    if (s.column < 0).any() and (spread > 0).any():
        unit = float(2.0 ** np.round(np.log2(np.median(spread[spread > 0]))))
        margin = _auction(scores, s, _FIRST * unit, _SOON * matrix)
        while margin > _LAST * unit:
            margin /= _FALL
            _auction(scores, s, margin, _LATE * matrix)
        _auction(scores, s, 0.0, tries)
    _augment(scores, s)
    return s.column.astype(np.int64) if proved(scores, s.column, s.prices) else None


def proved(scores: Scores, column: NDArray[np.int32], prices: NDArray[np.float64]) -> bool:
    """Whether prices of the columns prove that no permutation scores more than `column`, up to the rounding of a sum:
    n times 2⁻⁴⁸ of the largest score that it takes. False if it is no permutation.

    What net values are rounded by counts as a gap, so that prices far above all scores prove nothing.
    """
    n = len(scores)
    if not np.array_equal(np.sort(column), np.arange(n)):
        return False
    largest = np.abs(scores[np.arange(n), column]).max(initial=0.0)
    gap, size = _gap(scores, column, prices)
    return bool(gap + 2.0**-52 * size <= n * 2.0**-48 * largest)


class _State(NamedTuple):
    """What the parts of the solver share. column: of each row, or −1; row: of each column, or −1. columns, values: the
    list of each row, and the scores there (−inf where it is shorter). limit: no column beside a row's list had a larger
    net value when it was made. peaks, net, order: buffers to make a list. work: the number of scores read, and its
    limit."""

    prices: NDArray[np.float64]
    column: NDArray[np.int32]
    row: NDArray[np.int32]
    columns: NDArray[np.int32]
    values: NDArray[np.float64]
    limit: NDArray[np.float64]
    peaks: NDArray[np.float64]
    net: NDArray[np.float64]
    order: NDArray[np.int32]
    work: NDArray[np.float64]

    @classmethod
    def of(cls, scores: Scores, budget: float) -> _State:
        n = len(scores)
        parts = min(_PARTS, n)
        room = 2 * LISTED + -(-n // parts)
        none = np.full(n, -1, np.int32)
        lists = np.zeros((n, LISTED), np.int32), np.full((n, LISTED), -np.inf), np.full(n, np.inf)
        rooms = np.empty(parts), np.empty(room), np.empty(room, np.int32)
        return cls(np.zeros(n), none, none.copy(), *lists, *rooms, np.array([0.0, budget]))


def _compiled(function: F) -> F:
    """By numba, kept in a folder beside the source or of the user; where none can be written to, compiled each time."""
    try:
        return cast(F, njit(nogil=True, cache=True)(function))
    except RuntimeError:
        return cast(F, njit(nogil=True)(function))


@_compiled
def _cut(net: NDArray[np.float64], columns: NDArray[np.int32], many: int) -> float:
    """Of so many columns, bring the LISTED of the largest net values to the front (Hoare's selection). Returns the
    least of these."""
    low, high = 0, many - 1
    while low < high:
        pivot = net[(low + high) // 2]
        i, j = low, high
        while i <= j:
            while net[i] > pivot:
                i += 1
            while net[j] < pivot:
                j -= 1
            if i <= j:
                net[i], net[j] = net[j], net[i]
                columns[i], columns[j] = columns[j], columns[i]
                i += 1
                j -= 1
        if j >= LISTED:
            high = j
        elif i <= LISTED:
            low = i
        else:
            break
    least: float = net[0]
    for t in range(LISTED):
        least = min(least, net[t])
    return least


@_compiled
def _list(scores: Scores, s: _State, i: int) -> None:
    """Make the list of row i: its columns of the best net values, LISTED at most.

    The row is cut into strided parts. At least half of LISTED parts have a maximum of `limit` or more, so that at least
    as many columns have; only those parts are looked through.
    """
    prices, peaks, net, order = s.prices, s.peaks, s.net, s.order
    n, parts = len(prices), len(peaks)
    for p in range(parts):
        peaks[p] = scores[i, p] - prices[p]
    for start in range(parts, n, parts):
        for p in range(min(parts, n - start)):
            x = scores[i, start + p] - prices[start + p]
            peaks[p] = x if x > peaks[p] else peaks[p]
    limit = above = peaks[0]
    for p in range(parts):
        limit, above = min(limit, peaks[p]), max(above, peaks[p])
    for _ in range(24):  # bisection: `limit` leaves enough, `above` too few
        middle = limit + (above - limit) / 2
        many = 0
        for p in range(parts):
            many += peaks[p] >= middle
        if many < LISTED // 2:
            above = middle
        else:
            limit = middle
            if many <= 3 * LISTED // 4:
                break
    many = 0
    limit = np.nextafter(limit, -np.inf)  # from here on: of what is left out, none has more
    first = 97 * i % parts  # among ties, other columns for other rows
    for t in range(parts):
        p = (first + t) % parts
        if peaks[p] > limit:
            for j in range(p, n, parts):
                x = scores[i, j] - prices[j]
                if x > limit:
                    net[many] = x
                    order[many] = j
                    many += 1
        if many > 2 * LISTED or (many > LISTED and t == parts - 1):
            limit = _cut(net, order, many)
            many = LISTED
    for t in range(LISTED):
        s.columns[i, t] = order[t] if t < many else order[0]
        s.values[i, t] = scores[i, order[t]] if t < many else -np.inf
    s.limit[i] = limit
    s.work[0] += n


@_compiled
def _best(s: _State, i: int) -> tuple[float, float, int]:
    """The best and the second best net value on the list of row i, and the column of the best."""
    best = second = -np.inf
    at = 0
    for t in range(LISTED):
        x = s.values[i, t] - s.prices[s.columns[i, t]]
        if x > best:
            best, second, at = x, best, t
        elif x > second:
            second = x
    s.work[0] += LISTED
    return best, second, s.columns[i, at]


@_compiled
def _offer(scores: Scores, s: _State, i: int) -> tuple[float, float, int]:
    """The best and the second best net value of row i, and the column of the best."""
    best, second, j = _best(s, i)
    if second < s.limit[i]:
        _list(scores, s, i)
        best, second, j = _best(s, i)
    return best, second, j


@_compiled
def _auction(scores: Scores, s: _State, margin: float, patience: float) -> float:
    """A phase: each row that is further than ε from its best column, or has none, bids, and who is outbid bids again.
    Returns the ε that was reached: it is raised whenever so many scores (patience) have been looked at. With ε = 0 rows
    are left without a column from then on, as they are rather than that they bid in vain.
    """
    n = len(scores)
    queue = np.empty(n, np.int32)
    head = waiting = asked = 0
    due = s.work[0] + patience
    while (asked < n or waiting) and s.work[0] < s.work[1]:
        i = asked
        if asked < n:
            asked += 1
        else:
            i = queue[head]
            head = (head + 1) % n
            waiting -= 1
        best, second, j = _offer(scores, s, i)
        mine = s.column[i]
        if mine >= 0:
            if scores[i, mine] - s.prices[mine] >= best - margin:
                continue
            s.row[mine] = s.column[i] = -1
        other = s.row[j]
        if other >= 0 and (best - second + margin <= 0 or (margin == 0 and s.work[0] > due)):
            continue
        s.prices[j] += best - second + margin
        s.row[j] = i
        s.column[i] = j
        if other >= 0:
            s.column[other] = -1
            if other < asked:
                queue[(head + waiting) % n] = other
                waiting += 1
        if margin > 0 and s.work[0] > due:
            margin *= _RISE
            due += patience
    return margin


@_compiled
def _push(key: NDArray[np.float64], heap: NDArray[np.int32], place: NDArray[np.int32], size: int, x: int) -> int:
    """Put x where its key, new or less than before, belongs in the heap; returns the heap's size."""
    at = place[x]
    if at < 0:
        at = size
        size += 1
    while at > 0 and key[heap[(at - 1) // 2]] > key[x]:
        heap[at] = heap[(at - 1) // 2]
        place[heap[at]] = at
        at = (at - 1) // 2
    heap[at] = x
    place[x] = at
    return size


@_compiled
def _pop(key: NDArray[np.float64], heap: NDArray[np.int32], place: NDArray[np.int32], size: int) -> int:
    """Take the first of the heap, heap[0], out of it; returns the heap's size."""
    size -= 1
    place[heap[0]] = -1
    x = heap[size]
    at, below = 0, 1
    while below < size:
        if below + 1 < size and key[heap[below + 1]] < key[heap[below]]:
            below += 1
        if key[heap[below]] >= key[x]:
            break
        heap[at] = heap[below]
        place[heap[at]] = at
        at, below = below, 2 * below + 1
    if size:
        heap[at] = x
        place[x] = at
    return size


@_compiled
def _augment(scores: Scores, s: _State) -> None:
    """Give each row without a column one, along a shortest path to a column without a row. The length of a step from a
    row to a column is the row's best net value minus that of the column. All rows that have a column have their best.

    The heap has columns, 0 … n − 1, and rows, n + i, for the columns outside of their lists, which are at least as far
    as the list's limit. When a row comes first, its list is renewed; if that does not help, all columns are searched.
    """
    n = len(scores)
    key = np.full(2 * n, np.inf)
    heap = np.empty(2 * n, np.int32)
    place = np.full(2 * n, -1, np.int32)
    seen = np.empty(2 * n, np.int32)
    done = np.zeros(n, np.bool_)
    before = np.empty(n, np.int32)  # the row from which a column was reached
    level = np.empty(n)  # the distance of a row, plus its best net value
    for root in range(n):
        if s.column[root] >= 0:
            continue
        size = many = 0
        distance, nearest, end = 0.0, np.inf, -1
        i, whole = root, False
        level[root] = max(_best(s, root)[0], s.limit[root])  # an upper bound suffices at the root
        while s.work[0] < s.work[1]:
            for t in range(n if whole else LISTED):
                j = t if whole else s.columns[i, t]
                x = level[i] - ((scores[i, j] if whole else s.values[i, t]) - s.prices[j])
                x = max(x, distance)
                if x < nearest and x < key[j] and not done[j]:
                    if key[j] == np.inf:
                        seen[many] = j
                        many += 1
                    key[j] = x
                    before[j] = i
                    if s.row[j] < 0:
                        nearest, end = x, j
                    else:
                        size = _push(key, heap, place, size, j)
            s.work[0] += n if whole else LISTED
            rest = max(level[i] - s.limit[i], distance)
            if not whole and rest < nearest:
                if key[n + i] == np.inf:
                    seen[many] = n + i
                    many += 1
                key[n + i] = rest
                size = _push(key, heap, place, size, n + i)
            if size == 0 or key[heap[0]] >= nearest:
                break
            x = heap[0]
            distance = key[x]
            size = _pop(key, heap, place, size)
            whole = False
            if x < n:
                done[x] = True
                i = s.row[x]
                level[i] = distance + (scores[i, x] - s.prices[x])
            else:
                i = x - n
                limit = s.limit[i]
                _list(scores, s, i)
                whole = s.limit[i] >= limit
        for t in range(many):
            j = seen[t]
            if j < n and done[j]:
                s.prices[j] += nearest - key[j]
                done[j] = False
            key[j] = np.inf
            place[j] = -1
        if s.work[0] >= s.work[1]:
            break
        _assign_along(s, before, end)


@_compiled
def _assign_along(s: _State, before: NDArray[np.int32], end: int) -> None:
    """Give each row of the path to the column `end` the column that follows it."""
    while end >= 0:
        i = before[end]
        s.row[end] = i
        s.column[i], end = end, s.column[i]


@_compiled
def _gap(scores: Scores, column: NDArray[np.int32], prices: NDArray[np.float64]) -> tuple[float, float]:
    """By how much the bound that the prices prove is above the score of the permutation: Σᵢ maxⱼ (s − price) less the
    net value at column[i]; and the sum of the sizes of both. The gap is rounded by 2⁻⁵² of that at most: each of these
    net values by 2⁻⁵³ of itself (a difference is rounded monotonically, so that the largest stays it), and so is the
    difference of the two. 64 columns are compared at a time, without a branch for each."""
    n = len(scores)
    gap = size = 0.0
    for i in range(n):
        mine = best = scores[i, column[i]] - prices[column[i]]
        for start in range(0, n, 64):
            stop = min(n, start + 64)
            better = 0
            for j in range(start, stop):
                better += scores[i, j] - prices[j] > best
            if better:
                for j in range(start, stop):
                    best = max(best, scores[i, j] - prices[j])
        gap += best - mine
        size += abs(best) + abs(mine)
    return gap, size
