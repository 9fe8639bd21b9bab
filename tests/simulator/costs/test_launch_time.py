"""launch_time.py: waves of tiles, depth, the memory's bound and the gap between kernels."""

from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.simulator.costs.count import Launch, Product, Quickness
from megatron.simulator.costs.gpus import GPUS
from megatron.simulator.costs.launch_time import (
    BLOCK_WEIGHTS,
    BLOCKS,
    EIGHT_BITS,
    MX,
    Rates,
    product_speed,
)

RATES = GPUS["A100"].rates
SIZES = st.integers(1, 20_000)


def launch(m: int, n: int, k: int) -> Launch:
    return Launch("mm", 2 * (m * k + k * n + m * n), 2 * m * n * k, Product(m, n, k))


@given(SIZES, SIZES, SIZES)
def test_no_product_beats_the_share_that_full_waves_attain(m: int, n: int, k: int) -> None:
    assert 0 < product_speed(Product(m, n, k), RATES.multiprocessors) < 1
    least = 2 * m * n * k / (RATES.product_share * RATES.peak_flops)
    assert RATES.seconds(launch(m, n, k)) > least


@given(SIZES, SIZES, SIZES, st.integers(1, 1000))
def test_a_larger_product_takes_no_less(m: int, n: int, k: int, more: int) -> None:
    base = RATES.seconds(launch(m, n, k))
    for larger in (launch(m + more, n, k), launch(m, n + more, k), launch(m, n, k + more)):
        assert RATES.seconds(larger) >= base * (1 - 1e-9)


def test_one_tile_more_than_a_wave_takes_a_second_wave() -> None:
    full = Product(256 * RATES.multiprocessors, 128, 4096)
    more = Product(256 * RATES.multiprocessors + 1, 128, 4096)
    speeds = [product_speed(each, RATES.multiprocessors) for each in (full, more)]
    # 128 x 128 tiles need three waves of half the work, and attain less than 256 x 128.
    assert 0.5 < speeds[1] / speeds[0] < 0.65


def test_products_of_many_waves_and_great_depth_attain_the_whole_share() -> None:
    assert product_speed(Product(1 << 18, 1 << 18, 1 << 18), 108) == pytest.approx(1, abs=1e-2)


def test_a_batch_of_products_shares_its_waves() -> None:
    one, many = Product(1024, 1024, 1024), Product(1024, 1024, 1024, 27)
    assert product_speed(many, 108) > product_speed(one, 108)


def test_kernels_without_products_take_the_time_of_their_bytes() -> None:
    size = 10**9
    own = RATES.seconds(Launch("norm", size)) - RATES.gap
    assert own == pytest.approx(size / (RATES.memory_share * RATES.memory_bandwidth))


def test_products_take_the_time_of_their_bytes_where_the_memory_is_slow() -> None:
    slow = replace(RATES, memory_bandwidth=1e10)
    square = launch(2048, 2048, 2048)
    assert slow.seconds(square) == pytest.approx(slow.traffic(square.bytes) + slow.gap)


def test_only_products_of_cublas_are_faster_in_8_bits() -> None:
    wide, rates = launch(8192, 16384, 4096), GPUS["H100"].rates
    usual, quick, blocks, of_weights, scaled_by_32 = (
        rates.seconds(wide._replace(quickness=own)) - rates.gap for own in get_args(Quickness)
    )
    assert usual == rates.seconds(wide) - rates.gap
    assert usual == pytest.approx(EIGHT_BITS * quick)
    assert usual == pytest.approx(BLOCKS * blocks)
    assert usual == pytest.approx(BLOCK_WEIGHTS * of_weights)
    assert usual == scaled_by_32, "a Hopper has none"
    microscaled = wide._replace(quickness="MXFP8")
    blackwell = GPUS["B200"].rates
    assert blackwell.seconds(wide) - blackwell.gap == pytest.approx(
        MX * (blackwell.seconds(microscaled) - blackwell.gap)
    )
    thin = wide._replace(quickness="8 bits", bytes=10**12)
    assert rates.seconds(thin) == pytest.approx(rates.traffic(10**12) + rates.gap)


def test_a_gpu_without_8_bits_is_no_faster_by_them() -> None:
    wide = launch(8192, 16384, 4096)
    for name in ("A100", "A100-40GB"):
        rates = GPUS[name].rates
        for own in get_args(Quickness):
            assert rates.seconds(wide._replace(quickness=own)) == rates.seconds(wide)
    assert GPUS["B200"].rates.blocks == 1.0, "cuBLAS has no scales of blocks in fp32 for it"


def test_attention_takes_the_time_of_the_products_that_it_executes() -> None:
    whole = Launch("attention", 1, 10**12)
    masked = whole._replace(executed=10**12 // 2)
    seconds = [RATES.seconds(each) - RATES.gap for each in (whole, masked)]
    assert seconds[0] == pytest.approx(2 * seconds[1])


def test_an_empty_launch_takes_the_gap() -> None:
    assert RATES.seconds(Launch("fill_", 0)) == RATES.gap


@pytest.mark.parametrize("name", ["peak_flops", "memory_share", "multiprocessors"])
def test_a_rate_of_zero_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        replace(RATES, **{name: 0})


def test_a_negative_gap_is_refused() -> None:
    with pytest.raises(ValueError, match="gap=-1"):
        Rates(1.0, 1, 1.0, 1.0, 1.0, 1.0, -1.0)
