"""Where z0 lives."""

from sodaopt.anchors.places import *  # noqa: F403
from sodaopt.anchors.places import (
    ANCHORS,
    Anchor,
    Clone,
    Constant,
    Elsewhere,
    FromFile,
    Host,
    Regenerated,
    Rounded,
    anchor,
    constant_of,
    known_constants,
)
