"""Who is to blame for the death of an executor."""

from __future__ import annotations

from engine_core.blame import Blame, Verdict

A, B, C = ((b"c", name) for name in "abc")
LIVE = {A, B, C}
FREE = Verdict(culprit=None, deaths=0, trial=[])


def trial(*keys: tuple[bytes, str]) -> Verdict:
    return Verdict(culprit=None, deaths=0, trial=list(keys))


def test_the_suspects_of_a_crash_run_alone_and_the_second_crash_names_the_culprit() -> None:
    blame = Blame()
    assert blame.died({A: 5, B: 3, C: 9}, LIVE, outside=False) == trial(A, B, C)
    # A came through; B dies alone, no further than it was.
    assert blame.died({B: 3}, LIVE, outside=False) == Verdict(culprit=B, deaths=2, trial=[])


def test_one_that_came_further_starts_anew() -> None:
    blame = Blame()
    assert blame.died({A: 5}, LIVE, outside=False) == trial(A)
    assert blame.died({A: 6}, LIVE, outside=False) == trial(A)
    assert blame.died({A: 6}, LIVE, outside=False).culprit == A


def test_a_kill_from_outside_is_no_suspicion_yet() -> None:
    blame = Blame()
    assert blame.died({A: 5, B: 5}, LIVE, outside=True) == FREE
    assert blame.died({A: 5, B: 7}, LIVE, outside=True) == trial(A)
    assert blame.died({A: 5}, LIVE, outside=True) == Verdict(culprit=A, deaths=3, trial=[])


def test_kills_of_one_that_makes_progress_never_add_up() -> None:
    blame = Blame()
    assert all(blame.died({A: peak}, LIVE, outside=True) == FREE for peak in range(20))


def test_a_group_is_never_condemned_and_the_most_suspicious_come_first() -> None:
    blame = Blame()
    blame.died({B: 1}, LIVE, outside=False)
    assert blame.died({A: 1, B: 1, C: 1}, LIVE, outside=False) == trial(B, A, C)


def test_an_acquittal_by_end_is_forgotten() -> None:
    blame = Blame()
    blame.died({A: 1}, LIVE, outside=False)
    blame.died({B: 1}, {B}, outside=False)
    # The id is used again, by another request.
    assert blame.died({A: 1}, LIVE, outside=False) == trial(A)
