"""Metrics of several processes on one page, and when one that ended starts again."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from kvway_router.process_admin import merged_metrics
from kvway_router.processes import FIRST_PAUSE_S, LONGEST_PAUSE_S, pause_s

PAGE = """# HELP kvway_a_total What "a" is.
# TYPE kvway_a_total counter
kvway_a_total{route="/v1/x",code="200"} 1.0
kvway_a_total{route="a{b} c",code="500"} 2.0
# HELP kvway_b B.
# TYPE kvway_b gauge
kvway_b 3.0
# HELP kvway_s_seconds S.
# TYPE kvway_s_seconds histogram
kvway_s_seconds_bucket{le="0.1"} 1.0
kvway_s_seconds_bucket{le="+Inf"} 2.0
kvway_s_seconds_count 2.0
kvway_s_seconds_sum 0.5
"""


def test_every_sample_says_of_which_process_it_is() -> None:
    other = PAGE.replace("1.0", "7.0") + "# HELP kvway_c C.\n# TYPE kvway_c gauge\nkvway_c{} 4.0\n"
    families = list(text_string_to_metric_families(merged_metrics([(0, PAGE), (2, other)])))
    assert [family.name for family in families] == [
        "kvway_a", "kvway_b", "kvway_s_seconds", "kvway_c"
    ]  # fmt: skip
    samples = [sample for family in families for sample in family.samples]
    assert len(samples) == 7 + 7 + 1
    values = {(s.name, *sorted(s.labels.items())): s.value for s in samples}
    a = ("code", "200"), ("process", "0"), ("route", "/v1/x")
    assert values["kvway_a_total", *a] == 1.0
    assert values["kvway_a_total", a[0], ("process", "2"), a[2]] == 7.0
    assert values["kvway_b", ("process", "2")] == 3.0
    assert values["kvway_c", ("process", "2")] == 4.0


def test_of_no_process_there_are_no_metrics() -> None:
    assert merged_metrics([]).strip() == ""


def test_who_ends_soon_again_and_again_starts_later_and_later() -> None:
    pauses = [pause_s(number) for number in range(12)]
    assert pauses[0] == FIRST_PAUSE_S
    assert pauses == sorted(pauses)
    assert pauses[-1] == pause_s(10**9) == LONGEST_PAUSE_S
