"""Layup: the memory optimiser that writes the plan of a step, so that it fits a byte budget.

It holds no policy yet; ``minidnn`` trains under the plans ``keep`` and ``naive`` until it does.
"""
