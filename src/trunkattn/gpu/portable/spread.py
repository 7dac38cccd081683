"""How a launch's first tasks are spread over its CTAs."""

import math
from typing import Final

_NEAR: Final = 32  # steps on either side of the golden section that are looked at


def spread_stride(num_ctas: int) -> int:
    """The stride that spreads a launch's first tasks over all of its CTAs, however many tasks there are.

    CTA i begins with task i * stride, so task t goes to CTA t * step, where step is the inverse of the stride modulo
    the number of CTAs. Steps of the golden section of a circle leave the largest gaps between any number of points on
    it. So the step is close to the golden section of all CTAs, and of those near it the one whose quotient is as far
    from simple fractions as the golden section is.

    CTAs with neighbouring numbers may start on one SM, if others are still busy with the launch ahead.
    """
    golden = round(num_ctas * (math.sqrt(5) - 1) / 2)
    near = range(max(1, golden - _NEAR), min(num_ctas, golden + _NEAR) + 1)
    steps = [step for step in near if math.gcd(step, num_ctas) == 1]
    step = min(steps, key=lambda step: (_largest_quotient(num_ctas, step), abs(step - golden)))
    return pow(step, -1, num_ctas)


def _largest_quotient(a: int, b: int) -> int:
    """Returns the largest quotient of Euclid's algorithm. The larger it is, the nearer b / a is to a simple
    fraction."""
    most = 0
    while b:
        most, a, b = max(most, a // b), b, a % b
    return most
