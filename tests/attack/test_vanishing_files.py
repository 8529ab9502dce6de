"""Files that vanish and change under a tier, briefly; `vanishing_files.py` runs longer."""

from __future__ import annotations

import pytest

from tests.attack.vanishing_files import attack


@pytest.mark.seeds(1, long=6)
def test_whatever_happens_to_files_no_byte_is_wrong_and_the_tier_serves_again(seed: int) -> None:
    made = attack(seed, lambda num_played: num_played < 25)
    assert made.counts
