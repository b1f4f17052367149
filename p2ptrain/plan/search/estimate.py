"""Estimated round seconds of thousands of structures at once.

The chains of `bound.py` (asynchronously, of `steady_bound.py`) with balanced shares, and with every
transfer between two groups spread over their devices by share. It ranks structures; what it ranks
first is simulated.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from p2ptrain.plan.cost import CostModel
from p2ptrain.plan.request import Mode
from p2ptrain.plan.search.group_tables import Floats, GroupTables, Wholes

Truths: TypeAlias = NDArray[np.bool_]


class Estimator:
    """Estimates structures of one set of tables."""

    def __init__(self, tables: GroupTables) -> None:
        self.tables, self.cost, self.split = tables, tables.cost, tables.split
        self.count = tables.split.micro_batches
        self.rounds = tables.split.batch_size / tables.split.first_samples
        units = tables.cost.profile.units
        self._carried = np.array([0.0, *(unit.output_bytes for unit in units)])[tables.cuts]
        self._seconds_per_byte, self._latency = _links(tables.cost)
        self._deals = np.array([kind.deals for kind in tables.kinds])
        self._taking_turns = np.array(
            [len(kind.devices) if kind.deals else 1 for kind in tables.kinds]
        )
        self._grouped = np.array([len(kind.devices) > 1 for kind in tables.kinds])

    def seconds(self, kinds: Wholes, cuts: Wholes) -> Floats:
        """[N] of structures (kinds [N, P], cuts [N, P+1]); inf where memory forbids one.

        Of a round, or asynchronously of a mini-batch.
        """
        estimated = _Round(self, kinds, cuts)
        if self.cost.mode is Mode.ASYNC:
            return estimated.steady_seconds()
        return estimated.seconds()


def _links(cost: CostModel) -> tuple[Floats, Floats]:
    """[D, D] seconds a byte and latency from row to column."""
    devices = range(len(cost.devices))
    rates = [[cost.link(a, b).bytes_per_s for b in devices] for a in devices]
    latencies = [[cost.link(a, b).latency_s for b in devices] for a in devices]
    return 1 / np.array(rates), np.array(latencies)


class _Round:
    """The chains of one array of structures."""

    def __init__(self, owner: Estimator, kinds: Wholes, cuts: Wholes) -> None:
        self.owner, self.kinds, self.cuts = owner, kinds, cuts
        tables = owner.tables
        at = kinds, cuts[:, :-1], cuts[:, 1:]
        self.stages = kinds.shape[1]
        self.forward, self.backward = tables.forward[at], tables.backward[at]  # [N, P]
        self.load, self.reduce = tables.load[at], tables.reduce[at]
        self.depth = np.minimum.accumulate(tables.depth[at], axis=1)
        self.shares = tables.shares[at]  # [N, P, D]
        shape = len(kinds), tables.shares.shape[3]
        self.uplink, self.downlink = np.zeros(shape), np.zeros(shape)
        self.there = np.zeros((len(kinds), max(self.stages - 1, 0)))
        self.back = np.zeros_like(self.there)

    def seconds(self) -> Floats:
        """[N] the longest chain."""
        for p in range(self.stages - 1):
            self._hop(p)
        feed = self._feed()
        trips = self._trips()  # [N, P]
        # A holder in the first group begins at once.
        begins = self.shares[:, 0, self.owner.cost.holder] > 0
        feed = np.where(begins, 0.0, feed)
        fill, drain = feed.copy(), np.zeros_like(feed)
        pairs = (self.owner.count - 1) // 2
        longest: Floats = pairs * feed * self._feed_part() + feed + trips[:, 0]
        tail = np.zeros_like(feed)  # from a stage's last backward to the end
        for p in range(self.stages):
            rounds = np.maximum(np.ceil(self.owner.rounds / np.maximum(self.depth[:, p], 1)), 1)
            tail = np.maximum(tail, self.reduce[:, p])
            work = np.maximum(self.load[:, p], rounds * trips[:, p])
            longest = np.maximum(longest, fill + work + np.maximum(tail, drain))
            if p + 1 < self.stages:
                fill = fill + self.forward[:, p] + self.there[:, p]
                back = self.backward[:, p] + self.back[:, p]
                tail, drain = tail + back, drain + back
        interface = np.maximum(self.uplink, self.downlink).max(axis=1)
        longest = np.maximum(np.maximum(longest, interface), self._ends_load())
        longest[(self.depth[:, -1] < 1) | np.isnan(longest)] = np.inf
        return longest

    def _ends_load(self) -> Floats:
        """[N] seconds that a device computes which has both ends; else 0."""
        shared = (self.kinds[:, 0] == self.kinds[:, -1]) & (self.stages > 1)
        loads: Floats = np.where(shared, self.load[:, 0] + self.load[:, -1], 0.0)
        return loads

    def steady_seconds(self) -> Floats:
        """[N] per mini-batch of steady asynchronous running."""
        for p in range(self.stages - 1):
            self._hop(p)
        turns: Wholes = self.owner._taking_turns[self.kinds]  # [N, P]
        noam = np.cumsum(turns[:, ::-1], axis=1)[:, ::-1]
        trips = self._trips() / np.maximum(np.minimum(self.depth, noam), 1)
        feed = self._feed() * self._feed_part() / 2
        feed = np.where(self.shares[:, 0, self.owner.cost.holder] > 0, 0.0, feed)
        interface = np.maximum(self.uplink, self.downlink).max(axis=1) / self.owner.rounds
        paces = np.maximum(self.load / self.owner.rounds, np.maximum(trips, self.reduce / turns))
        longest: Floats = np.maximum(np.maximum(paces.max(axis=1), interface), feed)
        longest[(self.depth[:, -1] < 1) | np.isnan(longest)] = np.inf
        return longest

    def _hop(self, p: int) -> None:
        """Seconds and occupation between stages p and p+1."""
        owner = self.owner
        rates, each = owner._seconds_per_byte, owner._carried[self.cuts[:, p + 1]]
        before, after = self.shares[:, p], self.shares[:, p + 1]
        for out, sender, receiver in ((self.there, before, after), (self.back, after, before)):
            sent = sender * (receiver @ rates.T) * each[:, None]  # [N, D] seconds a sample
            received = receiver * (sender @ rates) * each[:, None]
            self.uplink += sent * owner.split.batch_size
            self.downlink += received * owner.split.batch_size
            whole = self._deals(p) | self._deals(p + 1)
            parallel = np.maximum(sent.max(axis=1), received.max(axis=1))
            carried = np.where(whole, sent.sum(axis=1), parallel) * owner.split.first_samples
            out[:, p] = carried + self._latencies(sender, receiver)

    def _latencies(self, sender: Floats, receiver: Floats) -> Floats:
        """[N] mean latency of what goes from one group to another."""
        mean: Floats = ((sender @ self.owner._latency) * receiver).sum(axis=1)
        return mean

    def _deals(self, p: int) -> Truths:
        deals: Truths = self.owner._deals[self.kinds[:, p]]
        return deals

    def _feed_part(self) -> Floats:
        """[N] part of the pieces that one device of stage 0 is fed."""
        part: Floats = np.where(self._deals(0), self.shares[:, 0].max(axis=1), 1.0)
        return part

    def _feed(self) -> Floats:
        """[N] seconds to feed stage 0 a micro-batch; adds all feeding to the interfaces."""
        owner, holder = self.owner, self.owner.cost.holder
        profile, samples = owner.cost.profile, owner.split.first_samples
        rates = owner._seconds_per_byte[holder]
        for p, each in ((0, profile.input_bytes), (self.stages - 1, profile.target_bytes)):
            taken = self.shares[:, p] * rates * (each * owner.split.batch_size)
            self.uplink[:, holder] += taken.sum(axis=1)
            self.downlink += taken
        latency = self.shares[:, 0] @ owner._latency[holder]
        first: Floats = (self.shares[:, 0] @ rates) * (profile.input_bytes * samples) + latency
        return first

    def _trips(self) -> Floats:
        """[N, P] one micro-batch from each stage to the end and back."""
        trips = self.forward + self.backward
        for p in reversed(range(self.stages - 1)):
            trips[:, p] += self.there[:, p] + self.back[:, p] + trips[:, p + 1]
        return trips
