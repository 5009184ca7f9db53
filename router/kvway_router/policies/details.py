"""Why a candidate was chosen, as one word and as a sentence with the numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvway_router.policies.reasons import Reason

if TYPE_CHECKING:
    from kvway_router.policies.weighing import Weighing
    from kvway_router.policy import Candidate, Decision, Prompt


def reason_of(chosen: int, weighing: Weighing, *, retry: bool) -> Reason:
    """Returns why one of the candidates was chosen by its cost."""
    if retry:
        return Reason.RETRY
    matched = weighing.matched
    if len(matched) == 1:
        return Reason.ONLY_REPLICA
    if matched[chosen] == max(matched) > 0:
        return Reason.PREFIX
    is_dearer = weighing.longest_cost() > weighing.cost[chosen]
    return Reason.SPILL if is_dearer else Reason.LEAST_LOADED


def detail_of(decision: Decision, *, prompt: Prompt) -> str:
    """Returns the same as a sentence; it names replicas and numbers and holds no prompt text."""
    reason, chosen, candidates = decision.reason, decision.chosen, decision.candidates
    holds = (
        f"{chosen.replica_id} holds {chosen.cached_tokens} of {prompt.num_tokens} prompt tokens"
    )
    predicted = f"first token predicted in {_time(chosen.ttft_s)}"
    others = [c for c in candidates if c.replica_id != chosen.replica_id]
    if reason is Reason.ONLY_REPLICA or not others:
        return f"{holds} and is the only replica to choose from; {predicted}."
    if reason is Reason.SPILL:
        longest = max(others, key=lambda c: (c.matched_blocks, -c.cost_s))
        return (
            f"{holds}; {longest.replica_id} holds {longest.cached_tokens}, "
            f"but with {_time(longest.queued_s)} of work before it{_failing(longest)} would cost "
            f"{_time(longest.cost_s)} against {_time(chosen.cost_s)}; {predicted}."
        )
    runner_up = f"next best {others[0].replica_id} in {_time(others[0].ttft_s)}"
    if reason is Reason.RETRY:
        return f"An earlier attempt at another replica failed; {holds}; {predicted}, {runner_up}."
    if reason is Reason.LEAST_LOADED:
        longest = max(candidates, key=lambda c: c.matched_blocks)
        nobody = (
            f"{longest.replica_id} holds {longest.cached_tokens} of {prompt.num_tokens} prompt "
            "tokens, too few to matter"
            if longest.matched_blocks
            else "No replica holds the beginning of this prompt"
        )
        return (
            f"{nobody}; {chosen.replica_id} has "
            f"{_time(chosen.queued_s)} of work before it; {predicted}, {runner_up}."
        )
    return f"{holds}; {predicted}, {runner_up}."


def _failing(candidate: Candidate) -> str:
    return f" and {_time(candidate.failing_s)} for failures" if candidate.failing_s else ""


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1.0 else f"{seconds * 1e3:.1f} ms"
