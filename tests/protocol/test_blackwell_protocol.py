"""Tests the Blackwell mainloop, alone and in fused operations, under many schedules; each defect must be reported."""

from __future__ import annotations

import pytest

from tests.ops import blackwell_cases
from tests.ops.blackwell_cases import FUSED, ONE, PAIR
from tests.protocol.blackwell_defects import EXCHANGED, MAINLOOP

# Five tiles or pairs of tiles for each CTA or CTA pair, with three k steps each.
PRODUCTS = {"one": (ONE, (640, 128, 192)), "pair": (PAIR, (1280, 128, 192))}


@pytest.mark.parametrize("completion", ["late", "random", "eager"])
@pytest.mark.parametrize("name", FUSED)
def test_fused_operations_are_exact_and_clean(name, completion):
    kernel = blackwell_cases.clean(name)
    for seed in range(3):
        kernel.run(cores=3, completion=completion, scheduler="pct", seed=seed)


@pytest.mark.parametrize("name", FUSED)
def test_launches_in_a_row(name):
    """The launches share memory and flags. Devices are late by any amount; flags keep the last launch's values."""
    blackwell_cases.clean(name).run(cores=2, completion="random", laps=3, seed=5)


@pytest.mark.parametrize("name", PRODUCTS)
def test_kernels_are_clean_before_defects_are_injected(name):
    config, shape = PRODUCTS[name]
    kernel = blackwell_cases.launched(config, shape, config.cluster)
    for seed in range(12):
        kernel.run(cores=config.cluster, completion=("eager", "late", "random")[seed % 3], seed=seed)


@pytest.mark.parametrize(
    ("defect", "name", "words"), MAINLOOP, ids=[f"{defect.__name__}-{name}" for defect, name, _ in MAINLOOP]
)
def test_each_defect_of_the_mainloop_is_reported(defect, name, words, monkeypatch):
    defect(monkeypatch)
    config, shape = PRODUCTS[name]
    cores = config.cluster
    report = blackwell_cases.launched(config, shape, cores).report(seeds=12, cores=cores)
    assert report, f"{defect.__name__} was not reported"
    assert words in str(report)


@pytest.mark.parametrize(
    ("defect", "name", "words"), EXCHANGED, ids=[f"{defect.__name__}-{name}" for defect, name, _ in EXCHANGED]
)
def test_each_defect_of_a_fused_operation_is_reported(defect, name, words, monkeypatch):
    defect(monkeypatch)
    report = blackwell_cases.fused(name, 2 if name != "ring m" else 3).report(seeds=12, cores=1)
    assert report, f"{defect.__name__} was not reported"
    assert words in str(report)
