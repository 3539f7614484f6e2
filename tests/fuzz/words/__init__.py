"""The vocabulary: functions of one, two or three values. None of them knows which dim carries the batch."""

# Each adds its own, in this order: with another, a search of the same seed would be another search.
from tests.fuzz.words import elementwise, shapes, statistics, products, indices, draws, layers  # noqa: F401, I001
