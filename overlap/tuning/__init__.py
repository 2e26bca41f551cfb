"""Which configuration a call gets: tables of measurements, and a model for what is in none.

This package has two halves. What this file exports (`problem`, `model`, `space`, `tables`, `choose`) stands on the
floor of `overlap.kernels`, whose dispatcher asks `choose_config`; it measures nothing. What measures (`operations`,
`timing`, `search`, `autotune`) calls the operations themselves, so it stands above `overlap.collectives`; nothing below
imports it.
"""

from overlap.tuning.choose import choose_config, xla_is_faster
from overlap.tuning.crossover import NOT_MEASURED
from overlap.tuning.problem import Problem
from overlap.tuning.space import candidates, heuristic

__all__ = ["NOT_MEASURED", "Problem", "candidates", "choose_config", "heuristic", "xla_is_faster"]
