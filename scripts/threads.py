"""Import this before NumPy: it makes matrix products run on one thread, unless the caller's environment says otherwise.

How a library splits a product decides in which order it adds, so results would depend on the number of cores. And the products
of small nets are short: on a computer with other work, threads that wait for each other made a step ten times slower.
"""

from __future__ import annotations

import os

for variable in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"):
    os.environ.setdefault(variable, "1")
