"""When a model counts as computing the same on the paged cache as without."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvway_core.errors import ConfigError
from kvway_worker.torch_engine.comparing import check_positions, check_prompt, check_scores


def scores(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(12, 200, generator=torch.Generator().manual_seed(1)).to(dtype)


def with_others(expected: Tensor, num_rows: int) -> Tensor:
    """Return the scores with the last rows in another order: as if of another prompt."""
    changed = expected.clone()
    changed[-num_rows:] = changed[-num_rows:].flip(-1)
    return changed


def test_equal_scores_pass_whatever_they_are() -> None:
    for expected in (scores(), torch.zeros(12, 200), scores(torch.bfloat16)):
        check_scores(expected.clone(), expected)
        check_positions(expected.clone(), expected)


def test_in_float32_one_other_position_is_refused() -> None:
    check_scores(scores() + 1e-4, scores())
    with pytest.raises(ConfigError, match="differ from those without the cache"):
        check_scores(with_others(scores(), 1), scores())


def test_in_bfloat16_positions_may_differ_until_most_do() -> None:
    expected = scores(torch.bfloat16)
    check_scores(with_others(expected, 5), expected)
    with pytest.raises(ConfigError, match="differ from those without the cache"):
        check_scores(with_others(expected, 8), expected)


def test_with_a_quantised_cache_positions_may_differ_until_most_do() -> None:
    check_scores(with_others(scores(), 5), scores(), is_quantised=True)
    with pytest.raises(ConfigError, match="differ from those without the cache"):
        check_scores(with_others(scores(), 8), scores(), is_quantised=True)


def test_other_positions_are_refused_in_any_dtype() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(ConfigError, match="positions"):
            check_positions(with_others(scores(dtype), 1), scores(dtype))


def test_tokens_ruled_out_on_both_sides_do_not_count() -> None:
    expected = scores()
    expected[:, 100:] = -torch.inf
    check_scores(expected + 1e-4, expected)
    with pytest.raises(ConfigError):
        check_scores(scores(), expected)


def test_scores_that_are_no_numbers_are_refused() -> None:
    broken = scores()
    broken[3, 5] = torch.nan
    for ours, own in ((broken, scores()), (scores(), broken), (broken, broken)):
        with pytest.raises(ConfigError):
            check_scores(ours, own)
        with pytest.raises(ConfigError):
            check_positions(ours, own)


def test_the_prompt_is_the_same_in_each_process_and_of_the_vocabulary() -> None:
    assert check_prompt(258, 12) == check_prompt(258, 12)
    assert len(set(check_prompt(100_000, 12))) == 12
    assert set(check_prompt(2, 12)) == {0, 1}
