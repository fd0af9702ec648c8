"""Questions about a recorded run, answered lazily.

Each function takes a Dataset with the variables of a run and returns a lazy DataArray or Dataset;
results do not depend on how the data is chunked.
"""

from analysis.freezing import freeze
from analysis.norms import displacement, grad_norms
from analysis.population import by_population
from analysis.summary import summary

__all__ = ["by_population", "displacement", "freeze", "grad_norms", "summary"]
