"""The model of ``tests.lib.turn_model``, thousands of small cases at a time: which of them end, and which deadlock."""

from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flash_attn_cute import BlockMask
from tests.lib.masks import tables_of

Numbers: TypeAlias = NDArray[Any]


class Cases(NamedTuple):
    """Additions of tiles, in the order of tickets: (cases, tickets, additions + 1) each.

    ``to`` is the number of a sum, -1 behind the last addition; ``turn`` how many come before.
    """

    to: Numbers
    turn: Numbers


class Shape(NamedTuple):
    """Sizes that cases have in common."""

    heads: int
    group: int  # heads that share keys, and an order
    blocks_q: int
    blocks_k: int
    block_q: int
    section: int  # heads that draw together


def random_cases(shape: Shape, count: int, rng: np.random.Generator, *, against: bool = False) -> Cases:
    """Masks of any share of visible blocks, launch orders and m_block orders, with the turns of the masks' tables.

    Args:
        shape: of all.
        count: of cases.
        rng: what draws them.
        against: whether tiles are launched in the reverse of the order that the tables are made for.
    """
    heads, group, blocks_q, blocks_k, block_q, section = shape
    draw = torch.Generator().manual_seed(int(rng.integers(2**32)))
    visible = torch.rand(count, heads, blocks_q, blocks_k, generator=draw) < torch.rand(count, 1, 1, 1, generator=draw)
    order = torch.rand(count, heads // group, blocks_k, generator=draw).argsort(-1)
    mask = BlockMask.from_blocks(visible, (block_q, 128)).with_order(order, group=group)
    turns = _turns_of(mask, block_q)  # (cases, heads, blocks_q, blocks_k)
    tickets = torch.tensor(
        [
            (head, rank)
            for first in range(0, heads, section)
            for rank in range(blocks_k)
            for head in range(first, min(first + section, heads))
        ]
    )
    head, rank = tickets.T
    n = (order.flip(-1) if against else order)[:, head // group, rank]  # (cases, tickets)
    every = torch.arange(count)[:, None]
    turn = turns[every, head, :, n]
    to = (head[:, None] * blocks_q + torch.arange(blocks_q)).expand_as(turn)
    # In any order; what is not visible comes last, and what is added to dK and dV behind the visible ones.
    at = torch.rand(turn.shape, generator=draw).masked_fill_(turn < 0, 3)
    if group > 1:
        of_keys = heads * blocks_q + head // group * blocks_k + n
        turn = torch.cat((turn, (head % group).expand_as(n)[..., None]), 2)
        to, at = torch.cat((to, of_keys[..., None]), 2), torch.nn.functional.pad(at, (0, 1), value=2)
    m_blocks = at.argsort(-1)
    turn = torch.nn.functional.pad(turn.gather(-1, m_blocks), (0, 1), value=-1)
    to = torch.nn.functional.pad(to.gather(-1, m_blocks), (0, 1), value=-1)
    return Cases(to.masked_fill(turn < 0, -1).numpy(), turn.numpy())


def _turns_of(mask: BlockMask, block_q: int) -> Tensor:
    """By the tables of a mask of whole blocks; -1 where nothing is added."""
    columns = tables_of(mask).columns
    assert columns is not None
    spans = columns.spans[0 if block_q == 64 else 1].long()
    blocks_q = -(-mask.seqlen_q // block_q)
    turns = torch.full((mask.batch, mask.heads, spans.shape[2], blocks_q), -1)
    start, counts = spans.flatten(0, 2).unbind(-1)
    assert torch.equal(start, start[0] + counts.cumsum(0) - counts)
    m, _, turn = columns.entries[start[0] : start[0] + counts.sum()].long().unbind(1)
    turns.view(-1)[torch.arange(len(counts)).repeat_interleave(counts) * blocks_q + m] = turn
    return turns.transpose(2, 3)


def worked_off(cases: Cases, num_ctas: Numbers, tickets_ahead: Numbers, rng: np.random.Generator) -> Numbers:
    """Plays cases event by event, whatever takes time taking any; (cases,): how many tickets are worked off in the end.

    Args:
        cases: what tiles add.
        num_ctas: (cases,).
        tickets_ahead: (cases,): how many a CTA may draw while it works on another, when it feels like it.
        rng: what draws durations.
    """
    result = np.zeros(len(num_ctas), dtype=np.int64)
    play, left = _Play(cases, num_ctas, tickets_ahead, rng), np.arange(len(num_ctas))
    while len(left):
        for _ in range(16):
            play.step()
        result[left] = play.finished
        goes_on = np.asarray(np.isfinite(play.time).any(1))
        left = left[goes_on]
        play.keep(goes_on)
    return result


class _Play:
    def __init__(self, cases: Cases, num_ctas: Numbers, tickets_ahead: Numbers, rng: np.random.Generator) -> None:
        count, ctas, ahead = len(num_ctas), int(num_ctas.max()), int(tickets_ahead.max())
        self.rng = rng
        self.to, self.turn = cases
        self.room = tickets_ahead + 1
        # When each CTA goes on; never if it waits for a turn, or there are no tickets.
        self.time = np.where(np.arange(ctas) < num_ctas[:, None], self.durations((count, ctas)), np.inf)
        self.held = np.full((count, ctas, ahead + 2), -1)  # tickets, that which is worked on before the others
        self.num_held = np.zeros((count, ctas), dtype=np.int64)
        self.added = np.zeros((count, ctas), dtype=np.int64)  # of the ticket that is worked on
        self.waits_for = np.full((count, ctas, 2), -1)  # a sum and a turn
        self.sums = np.zeros((count, int(cases.to.max(initial=0)) + 1), dtype=np.int64)
        self.next_ticket = np.zeros(count, dtype=np.int64)
        self.finished = np.zeros(count, dtype=np.int64)

    def durations(self, shape: tuple[int, ...]) -> Numbers:
        """Between nothing and thirty times the mean."""
        return self.rng.random(shape) * self.rng.choice([0.0, 1.0, 30.0], shape)

    def keep(self, which: Numbers) -> None:
        """Leaves the others out."""
        for name, value in vars(self).items():
            if isinstance(value, np.ndarray):
                setattr(self, name, value[which])

    def step(self) -> None:
        """In each case, what happens next."""
        case = np.arange(len(self.time))
        cta = self.time.argmin(1)
        now = self.time[case, cta]
        runs = np.isfinite(now)
        case, cta, now = case[runs], cta[runs], now[runs]
        later = now + self.durations(now.shape)

        self._draw(case, cta, self.num_held[case, cta] == 0)
        ahead = self.num_held[case, cta] < self.room[case]
        self._draw(case, cta, ahead & (self.rng.random(len(case)) < 0.3))

        works = self.num_held[case, cta] > 0
        self.time[case[~works], cta[~works]] = np.inf
        case, cta, now, later = case[works], cta[works], now[works], later[works]
        place = case, self.held[case, cta, 0], self.added[case, cta]
        to, turn = self.to[place], self.turn[place]

        ends = to < 0
        self._finish(case[ends], cta[ends], later[ends])
        has_turn = ~ends & (self.sums[case, to] == turn)
        self._add(case[has_turn], cta[has_turn], to[has_turn], now[has_turn], later[has_turn])
        waits = ~ends & ~has_turn
        self.time[case[waits], cta[waits]] = np.inf
        self.waits_for[case[waits], cta[waits]] = np.stack((to[waits], turn[waits]), 1)

    def _draw(self, case: Numbers, cta: Numbers, wants: Numbers) -> None:
        draws = wants & (self.next_ticket[case] < self.to.shape[1])
        case, cta = case[draws], cta[draws]
        self.held[case, cta, self.num_held[case, cta]] = self.next_ticket[case]
        self.num_held[case, cta] += 1
        self.next_ticket[case] += 1

    def _finish(self, case: Numbers, cta: Numbers, later: Numbers) -> None:
        self.held[case, cta, :-1] = self.held[case, cta, 1:]
        self.num_held[case, cta] -= 1
        self.added[case, cta] = 0
        self.finished[case] += 1
        self.time[case, cta] = later

    def _add(self, case: Numbers, cta: Numbers, to: Numbers, now: Numbers, later: Numbers) -> None:
        self.sums[case, to] += 1
        self.added[case, cta] += 1
        self.time[case, cta] = later
        # The next turn is signalled.
        signalled = np.stack((to, self.sums[case, to]), 1)
        woken, whom = (self.waits_for[case] == signalled[:, None]).all(2).nonzero()
        self.time[case[woken], whom] = now[woken] + self.durations(woken.shape)
        self.waits_for[case[woken], whom] = -1
