"""Types of NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Wide = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]
Groups = npt.NDArray[np.bool_]
"""Members of each population, (population, token), or other flags."""
