"""What the named planners would answer: `auto` is at least as good as each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from p2ptrain.plan.papers.dp import judge_dp
from p2ptrain.plan.papers.equal_shares import judge_pp
from p2ptrain.plan.papers.ftpipehd import judge_ftpipehd
from p2ptrain.plan.papers.hybrid import judge_hybrid
from p2ptrain.plan.papers.pipedream import judge_pipedream
from p2ptrain.plan.papers.single import best_singles
from p2ptrain.plan.shared.judge import Judged
from p2ptrain.plan.shared.question import Question
from p2ptrain.plan.shared.rules import Rules

EVERY_DEVICE_A_STAGE: Mapping[str, Callable[[Question], Judged | None]] = {
    "pp": judge_pp,
    "ftpipehd": judge_ftpipehd,
}
"""Planners that need as many units as devices."""
OTHERS: Mapping[str, Callable[[Question], Judged | None]] = {
    "dp": judge_dp,
    "hybrid": judge_hybrid,
    "pipedream": judge_pipedream,
}


def named_answers(question: Question, rules: Rules) -> Iterator[tuple[str, Judged]]:
    """(planner, its draft) of every named planner that has an answer which `rules` allow."""
    for name, judged in _every_answer(question):
        if rules.allow(judged.draft):
            yield name, judged


def _every_answer(question: Question) -> Iterator[tuple[str, Judged]]:
    alone = (question.cost.holder,) if question.private else question.devices
    for judged in best_singles(question.judge, question.splits, alone).values():
        yield "single", judged
    stages = len(question.devices) + (question.private and len(question.devices) > 1)
    straight = EVERY_DEVICE_A_STAGE if stages <= question.cost.unit_count else {}
    for name, judge_named in {**straight, **OTHERS}.items():
        answer = judge_named(question)
        if answer is not None:
            yield name, answer
