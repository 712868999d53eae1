"""Rounds lengths up to a few sizes, so that a new length rarely compiles a new program.

Padding never changes a result (it takes no slot, is not counted in the capacity and is masked in
attention), it only costs work. Two sizes per power of two bound the waste at one half of the
length, one third on average.
"""

#: Below this, a longer program costs next to nothing.
SMALLEST = 16


def bucket(length: int, *, smallest: int = SMALLEST, largest: int | None = None) -> int:
    """The smallest of 16, 24, 32, 48, 64, 96, ... that holds ``length``.

    Args:
        length: positions, at least 0.
        smallest: the first size; a power of two, at least 2.
        largest: no size exceeds it, unless ``length`` itself does (a model's number of positions).
    """
    size = smallest
    while size < length:
        half_step = size + size // 2
        size = half_step if half_step >= length else size * 2
    if largest is not None:
        size = max(min(size, largest), length)
    return size
