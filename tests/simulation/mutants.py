"""Planted bugs: each a small override of one rule. The simulator must find every one.

A checker that finds nothing may be blind; these keep it honest.
"""

from __future__ import annotations

import dataclasses
from random import Random

from p2ptrain.mesh.election.election import Election
from p2ptrain.mesh.election.terms import CoordinatorClaim, ElectionConfig
from p2ptrain.mesh.interface import MemberState
from p2ptrain.mesh.membership.core_events import CoordinatorIs, MemberRecord
from p2ptrain.mesh.membership.core_messages import Claim
from p2ptrain.mesh.membership.membership import Membership
from tests.simulation.device import Build


class NeverRefutes(Membership):
    """Hears that it is dead, and says nothing."""

    def _receive_of_self(self, record: MemberRecord, peer: str) -> None:
        pass


class RaisesTheDead(Membership):
    """Believes "alive" in the incarnation that died."""

    def _learn(self, claim: Claim, peer: str) -> None:
        known = self.members.get(claim.record.id)
        gone = known is not None and known.state in (MemberState.DEAD, MemberState.LEFT)
        same = known is not None and known.incarnation == claim.record.incarnation
        if gone and same and claim.record.state is MemberState.ALIVE:
            self._adopt(claim.record, "alive again", (), peer)
        else:
            super()._learn(claim, peer)


class RefutesForOthers(Membership):
    """Raises the incarnation of a member that it merely heard from."""

    def _learn(self, claim: Claim, peer: str) -> None:
        record = claim.record
        if record.state is MemberState.SUSPECT and record.id != self._table.me.id:
            raised = dataclasses.replace(
                record, incarnation=record.incarnation + 1, state=MemberState.ALIVE
            )
            claim = Claim(raised)
        super()._learn(claim, peer)


class BuriesSilently(Membership):
    """A restarted device takes its predecessor's place without a word."""

    def _bury_predecessor(
        self, record: MemberRecord, known: MemberRecord | None
    ) -> MemberState | None:
        return None if known is None else MemberState.DEAD


class VotesTwice(Election):
    """Votes again in a term it already voted in."""

    def _on_vote(self, peer: str, term: int) -> None:
        if term == self._terms.own:
            self._terms.own -= 1
        super()._on_vote(peer, term)


class ForgetsItsTerm(Election):
    """Ignores the term floor from its disk."""

    def __init__(self, self_id: str, config: ElectionConfig, rng: Random, term_floor: int = 0):
        super().__init__(self_id, config, rng, 0)


class FollowsOlderTerms(Election):
    """Follows the one that announced last."""

    def _on_rival(self, ours: CoordinatorClaim, theirs: CoordinatorClaim) -> None:
        self._terms.own = max(self._terms.own, theirs.term)
        self._claim = theirs
        self._out.append(CoordinatorIs(theirs.id, theirs.term, "it announced itself last"))


class NeverStepsDown(Election):
    """A coordinator that thawed, or met another group, goes on regardless."""

    def _on_rival(self, ours: CoordinatorClaim, theirs: CoordinatorClaim) -> None:
        if not self._coordinates:
            super()._on_rival(ours, theirs)


class CountsNobody(Election):
    """Takes office with its own vote alone."""

    def _count(self) -> None:
        if self._campaign is not None and not self._campaign.poll:
            self._win(self._campaign)
        else:
            super()._count()


MUTANTS: dict[str, Build] = {
    mutant.__name__: Build(membership=mutant)
    for mutant in (NeverRefutes, RaisesTheDead, RefutesForOthers, BuriesSilently)
} | {
    mutant.__name__: Build(election=mutant)
    for mutant in (VotesTwice, ForgetsItsTerm, FollowsOlderTerms, NeverStepsDown, CountsNobody)
}
