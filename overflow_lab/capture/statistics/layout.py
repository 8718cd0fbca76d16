"""Where a statistic lies in a row of the tape: 64-bit words, integers first, then float64 bits, then the histogram."""

from __future__ import annotations

COUNT, NAN, POSINF, NEGINF, ZERO = range(5)
MIN, MAX, SMALLEST, SUM, SUM_OF_SQUARES = range(8, 13)
FLOATS = slice(MIN, SUM_OF_SQUARES + 1)

# One bin for each biased float32 exponent. The row is a whole number of 64-byte cache lines.
EXPONENTS = 16
BINS = 256
WORDS = EXPONENTS + BINS

# What a comparison with a shadow gives, as float64: squared differences, squared shadows, the shadow's extremes, and
# how many zeros have a shadow that is subnormal, or one that is not zero.
ERROR, SCALE, LEAST, MOST, FLUSHED, ZEROED = range(6)
COMPARED = 6
