"""The table of replicas: cells by hand, and figures that follow the link."""

from tools.replicas_at_scale import Case, Found, parse_arguments, report, simulated


def test_the_tables_say_what_a_size_costs_and_what_is_hidden() -> None:
    words = "--pipeline-schedule 1f1b zb-v --replicas 64 --bandwidth 50 --bucket-size 4e7 1e9"
    options = parse_arguments(words.split())
    seconds = {("1f1b", 4e7): 1.2, ("1f1b", 1e9): 1.0, ("zb-v", 4e7): 0.5, ("zb-v", 1e9): 1.0}
    found = {
        Case(schedule, 50.0, 64, size): Found(time, 0.25, 0.5, 3)
        for (schedule, size), time in seconds.items()
    }
    lines = list(report(found, options))
    assert "| replicas | 40M | 1000M |" in lines
    assert "| 64 | 10.0% | 50.0% |" in lines
    assert "| 1f1b | 1.200 (25%, 50%) | 1.000 (25%, 50%) |" in lines


def test_small_buckets_pay_for_their_latency() -> None:
    words = (
        "--pipeline-schedule interleaved --replicas 64 --bucket-size 1e6 1e9 --bandwidth 50 -m 8"
    )
    late = parse_arguments([*words.split(), "--latency", "1000"])
    free = parse_arguments([*words.split(), "--latency", "0"])
    (small, large), (small_free, large_free) = (simulated(o).values() for o in (late, free))
    assert small.buckets > large.buckets
    pays = small.seconds - small_free.seconds
    assert pays > 1.5 * (large.seconds - large_free.seconds) > 0
    assert small_free.seconds <= large_free.seconds
    for one in (small, large, small_free, large_free):
        assert 0 <= one.reduced <= 1
        assert 0 <= one.gathered <= 1
