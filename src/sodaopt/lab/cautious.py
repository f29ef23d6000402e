"""A pull that acts only on the elements that the base optimizer moves in the pull's direction.

This is an experiment of the studies `candidates-...`, after Cautious Weight Decay (arXiv
2510.12402). With z0 = 0 and lam = lr wd it is Cautious Weight Decay.
"""

from collections.abc import Generator

import torch
from torch import Tensor

from sodaopt.anchors import Source, pull_
from sodaopt.wrappers.soda import SODAWrapper


class CautiousWrapper(SODAWrapper):
    """Pull the elements x with (z0 - x) u > 0, where u is the base optimizer's update.

    These elements become x + u + lam (z0 - x), and all others x + u.
    """

    def _pull(self, xs: list[Tensor], z0: list[Source], lam: float) -> Generator[None]:
        before = [x.clone() for x in xs]
        pulls = [x.clone() for x in xs]
        pull_(pulls, z0, lam)
        torch._foreach_sub_(pulls, before)
        yield  # here the base optimizer adds u
        for x, old, pull in zip(xs, before, pulls, strict=True):
            x.add_(pull * ((x - old) * pull > 0))
