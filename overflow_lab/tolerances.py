"""How far an output may be off before it is more than a format's own rounding: the numbers that judge, in one place."""

from __future__ import annotations

from overflow_lab.formats import FloatFormat

# In a sweep over hundreds of healthy architectures the output error had a 95th percentile of 1.5 percent in bfloat16
# and 0.3 in float16: 4 and 6 units of their rounding (u = eps / 2); 16 leaves room for depth.
TOLERATED_ROUNDINGS = 16
# An output of float32 is judged as one of float16 is: who runs in half precision does not ask for more.
LEAST_TOLERANCE = TOLERATED_ROUNDINGS * 2.0**-11
# An error up to so many times the noise floor is the model's own conditioning, if it is no more than a quarter: healthy
# models show 2 to 4 times what one rounding of their weights does, and real faults 24 times and more.
TOLERATED_NOISE, MOST_NOISE = 6, 0.25
# An output whose error is above this share of its own spread has lost what sets its elements apart (scores near 1,
# say).
SPREAD = 0.15
# Above this share of changed decisions an output is called imprecise even where its error is small.
TIES = 0.25
# Rounding evens out two scores here and there; where it does so in this share of at least so many rows, the choice is
# the format's and no longer the model's.
EVENED, EVENED_ROWS = 0.5, 3


def tolerance(fmt: FloatFormat) -> float:
    """Return the relative error of an output that is taken as the format's own rounding."""
    return max(TOLERATED_ROUNDINGS * fmt.eps / 2, LEAST_TOLERANCE)
